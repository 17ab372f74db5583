"""Registry: things that a configuration chooses by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from agentfly.core.errors import ConfigError, suggest_name, type_of

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name.

    Args:
        kind: what they are, for messages: ``algorithm``, ``loss``.
        wanted: the class that each of them is of; None takes anything.
    """

    def __init__(self, kind: str, wanted: type[T] | None = None) -> None:
        self._kind = kind
        self._wanted = wanted
        self._known: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        """Make a thing known by a name.

        Raises:
            ConfigError: the name is taken, or the thing is of another class.
        """
        self.require_kind(name, thing)
        if name in self._known:
            raise ConfigError(f"There is already a {self._kind} named {name!r}; register yours under another name.")
        self._known[name] = thing

    def require_kind(self, name: str, thing: object) -> None:
        """Raise unless a thing is of the class that all things here are of.

        Raises:
            ConfigError: it is of another class.
        """
        if self._wanted is not None and not isinstance(thing, self._wanted):
            raise ConfigError(
                f"The {self._kind} {name!r} is {type_of(thing)}, and has to be of the class "
                f"{self._wanted.__name__} ({self._wanted.__module__}), which holds the function and says what it uses."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were registered."""
        return iter(tuple(self._known))

    def __getitem__(self, name: str) -> T:
        """The thing of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._known:
            raise ConfigError(f"There is no {self._kind} {name!r}. {suggest_name(name, sorted(self._known))}")
        return self._known[name]

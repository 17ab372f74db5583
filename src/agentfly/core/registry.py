"""Registry: named choices of a setting, such as algorithms and losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from agentfly.core.errors import ConfigError, suggest_name, type_of

T = TypeVar("T")


class Registry(Generic[T]):
    """Values of one kind by name. Users add their own with `register`.

    Args:
        kind: the kind, for messages: ``algorithm``, ``loss``.
        known: the values that the package has.
        value_type: the class of all values; None accepts any.
    """

    def __init__(self, kind: str, known: Mapping[str, T], value_type: type[T] | None = None) -> None:
        self._kind = kind
        self._value_type = value_type
        self._known = dict(known)

    def register(self, name: str, value: T) -> None:
        """Add a value under a name.

        Raises:
            ConfigError: the name is taken, or the value has another class.
        """
        self.require_type(name, value)
        if name in self._known:
            raise ConfigError(f"There is already a {self._kind} named {name!r}; register yours under another name.")
        self._known[name] = value

    def require_type(self, name: str, value: object) -> None:
        """Raise unless a value has the class of all values.

        Raises:
            ConfigError: it has another class.
        """
        if self._value_type is not None and not isinstance(value, self._value_type):
            raise ConfigError(
                f"The {self._kind} {name!r} is {type_of(value)}, and has to be of the class "
                f"{self._value_type.__name__} ({self._value_type.__module__}), which holds the function and says what "
                "it uses."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of their registration."""
        return iter(tuple(self._known))

    def __getitem__(self, name: str) -> T:
        """Return the value with this name.

        Raises:
            ConfigError: the name is unknown; the message suggests the nearest one.
        """
        if name not in self._known:
            raise ConfigError(f"There is no {self._kind} {name!r}. {suggest_name(name, sorted(self._known))}")
        return self._known[name]

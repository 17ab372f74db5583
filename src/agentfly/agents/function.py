"""UserFunction: a function of the user's that has been made into something, and is still a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from agentfly.agents.needs import Needs, needs_for
from agentfly.errors import UsageError
from agentfly.resources.environments.parcel import blame, importable
from agentfly.resources.spec import ResourceSpec
from agentfly.task import Task


@dataclass(frozen=True, eq=False, repr=False)
class UserFunction:
    """What a decorator makes of a function: callable as the function, and picklable though it has taken its name.

    Attributes:
        function: the function.
        name: what it is called in AgentFly.
        resources: what it needs for the whole of a rollout, as far as that is known before it is called.
    """

    function: Callable[..., Any]
    name: str
    resources: Needs = field(default=(), kw_only=True)

    _kind: ClassVar[str]
    _mistake: ClassVar[type[UsageError]]  # what its author is told

    def __post_init__(self) -> None:
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            self.__dict__[attribute] = getattr(self.function, attribute, None)
        self.__dict__["__wrapped__"] = self.function

    def needs(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """What it has declared that it needs for a task.

        Raises:
            ToolDefinitionError, RewardDefinitionError: the function that says so failed for this task.
        """
        try:
            return needs_for(self.resources, task)
        except ValueError as error:
            raise self._mistake(f"The {self._kind} {self.name!r}: {error}.") from error.__cause__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself: nothing is checked or filled in, and a coroutine is to be awaited."""
        return self.function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """By name where another process can import it so, as functions are; else by value, which needs cloudpickle."""
        module, path = self.__dict__["__module__"], self.__dict__["__qualname__"]
        if module in sys.modules and module != "__main__" and path and importable(module):
            try:
                if attrgetter(path)(sys.modules[module]) is self:
                    return str(path)
            except AttributeError:  # it is local to a function, or has been replaced
                pass
        self._require_portable()
        return super().__reduce_ex__(protocol)

    def _require_portable(self) -> None:
        """See that it can be pickled by value.

        Raises:
            UsageError: a part of it cannot; the message gives the path to that part.
        """
        if _looking.get():  # it refers to itself
            return
        token = _looking.set(True)
        try:
            for part, name in ((self.function, self.name), (self.resources, f"{self.name}.resources")):
                if not _pickles(part):
                    path, culprit = blame(part, name, _pickles)
                    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
                    raise UsageError(
                        f"{path} is a {kind}, which cannot be pickled, and so {self.name} cannot travel to another "
                        "process. Make it at its first use, or take it from a resource: context.acquire(…)."
                    )
        finally:
            _looking.reset(token)


_looking: ContextVar[bool] = ContextVar("_looking", default=False)


def _pickles(value: Any) -> bool:
    import cloudpickle  # here, because only those who pickle need it

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def name_of(function: Callable[..., Any]) -> str:
    """What a callable calls itself."""
    return str(getattr(function, "__name__", type(function).__name__))

"""Resource: a live instance of a spec. Scope: the lifetime of a lease."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, ClassVar, NoReturn

from agentfly.core.errors import UsageError


class Status(StrEnum):
    """Health of a resource, as reported to the engine."""

    HEALTHY = "healthy"
    BROKEN = "broken"  # it is not handed out any more; the engine replaces it


class Resource(ABC):
    """A live instance of a spec. The engine calls the four lifecycle methods; tools call what the kind adds.

    Contract, checked by `agentfly.testing.resource_conformance`:

    * `start` is called once, first. If it raises or is cancelled, the engine calls `release`, which must work after any
      part of the start.
    * `reset` restores the state after `start`. The next owner must not see anything that an earlier owner left behind.
      If it raises, the instance is released and replaced.
    * `status` is quick. It does not raise for a broken instance, but returns `Status.BROKEN`. It may be called while
      the instance is in use, and must not wait for operations in it.
    * `release` frees everything, is safe to call twice and after any failure, and returns only when the instance is
      gone. The engine shields it from the cancellation of the owner, allows twice ``release_timeout_s``, and calls it
      once more if it fails or does not return.

    A kind may offer more:

    * *A quick status*: `quick_status` returns at once whether the instance is visibly gone. It is called before each
      hand-out of an instance, which may be long after the last health check.
    * *Freezing*: with ``can_freeze = True``, `freeze` and `thaw`. The engine calls them for specs with
      ``idle="freeze"``, one at a time and never while a coroutine of the instance runs for an owner. Every method that
      needs the instance's processes must then be a coroutine function, because the engine thaws the instance for
      coroutines only. While frozen, `status` works, and `release` and the kind's ``reap`` succeed.
    * *Preparation*: if a spec has a ``preparation_key``, `prepare` is called before the first start that needs it.

    Attributes:
        can_freeze: whether instances can be frozen.
    """

    can_freeze: ClassVar[bool] = False

    def __init__(self, spec: Any, instance: str) -> None:
        """Create the object. No I/O happens before `start`.

        Args:
            spec: the spec of the instance.
            instance: the instance's name, unique on the machine and used in the ledger.
        """
        self.spec = spec
        self.instance = instance

    @abstractmethod
    async def start(self) -> None:
        """Start the instance. Return when it is ready for use."""

    @abstractmethod
    async def reset(self) -> None:
        """Restore the state of the instance after `start`."""

    @abstractmethod
    async def status(self) -> Status:
        """Return whether the instance can be used."""

    def quick_status(self) -> Status:
        """Return whether the instance is usable, as far as this is visible without waiting.

        It must take microseconds, for instance to check whether a process is alive or a connection is closed. An
        unknown state counts as healthy. It may be called while the instance is frozen or in use.
        """
        return Status.HEALTHY

    @abstractmethod
    async def release(self) -> None:
        """Free everything that belongs to the instance."""

    async def freeze(self) -> None:
        """Stop the instance's processes, so that they take no processor time. Do nothing if they are stopped.

        If it is cancelled or raises, `thaw` must still make the instance work again.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be frozen.")

    async def thaw(self) -> None:
        """Continue the instance's processes after `freeze`. Return when they run. Do nothing if they run."""
        raise NotImplementedError(f"{type(self).__name__} cannot be frozen.")

    @classmethod
    async def prepare(cls, spec: Any) -> None:
        """Fetch the prerequisites of a spec's instances to this machine, for instance an image.

        The engine calls it once for all specs with one ``preparation_key``. It is not called again during or after a
        success. It is called again after it failed or a start failed. It must be fast if everything is present.
        """
        raise NotImplementedError(f"{cls.__name__} has no prepare(), but its spec has a preparation_key.")

    @property
    def traces(self) -> dict[str, Any]:
        """Data with which a later process can remove this instance if this process dies: process ids, directories.

        JSON-able; empty while nothing would outlive this process. The engine writes it to the ledger before `start` and
        again after it. The kind's ``reap`` function receives it.
        """
        return {}


class Scope(StrEnum):
    """Lifetime of a lease."""

    CALL = "call"  # this tool call
    ROLLOUT = "rollout"  # until the rollout ends
    GLOBAL = "global"  # shared by many owners, until the engine closes or it idles out

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise UsageError(f"scope={value!r}: write one of {', '.join(repr(scope.value) for scope in cls)}.")

"""Resource: a live instance of a spec; and Scope: how long a lease of it lasts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, ClassVar, NoReturn

from agentfly.core.errors import UsageError


class Status(StrEnum):
    """Health of a resource, as reported to the engine."""

    HEALTHY = "healthy"
    BROKEN = "broken"  # it must not be given to anybody; the engine replaces it


class Resource(ABC):
    """A live instance of a spec. The engine calls the four lifecycle methods; tools call what the kind adds.

    Contract, checked by `agentfly.testing.resource_conformance`:

    * `start` is called once, first. If it raises or is cancelled, the engine calls `release`, which must cope with
      whatever part of the start had been done.
    * `reset` brings the instance back to the state it had after `start`. Nothing that an earlier owner left behind
      may be seen by the next. If it raises, the instance is released and replaced.
    * `status` is quick and never raises for a broken instance: it answers `Status.BROKEN`. It may be called while the
      instance is in use and must not wait for what runs in it.
    * `release` frees everything, is safe to call twice and after any failure, and returns only when the instance is
      gone. The engine shields it from the cancellation of whoever gives the instance back, gives it twice
      ``release_timeout_s``, and calls it once more if it fails or does not return.

    A kind may offer more:

    * *A quick status*: `quick_status` says at once whether the instance can be seen to be gone. It is asked whenever an
      instance is about to be handed out, which may be long after the last health check.

    * *Freezing*: with ``can_freeze = True``, `freeze` and `thaw`. The engine calls them for specs with
      ``idle="freeze"``, one at a time and never while a coroutine of the instance that an owner called is under way.
      Every method that needs the instance's processes must then be a coroutine function, because that is what the
      engine can thaw for. While frozen, `status` answers, and `release` and the kind's ``reap`` succeed.
    * *Preparation*: a spec that names one in ``preparation_key`` has `prepare` called before the first start that
      needs it.

    Attributes:
        can_freeze: whether instances can be frozen.
    """

    can_freeze: ClassVar[bool] = False

    def __init__(self, spec: Any, instance: str) -> None:
        """Make a handle; no I/O happens before `start`.

        Args:
            spec: the spec this is an instance of.
            instance: the instance's name, unique on the machine; the ledger knows it by this name.
        """
        self.spec = spec
        self.instance = instance

    @abstractmethod
    async def start(self) -> None:
        """Bring the instance up; return when it is ready for use."""

    @abstractmethod
    async def reset(self) -> None:
        """Bring the instance back to the state it had after `start`."""

    @abstractmethod
    async def status(self) -> Status:
        """Say whether the instance can be used."""

    def quick_status(self) -> Status:
        """Report whether the instance is usable, as far as that can be seen without waiting.

        It must take microseconds: for instance check whether a process lives or a connection is closed. If nothing is
        known, the instance counts as healthy. It may be called while the instance is frozen or in use.
        """
        return Status.HEALTHY

    @abstractmethod
    async def release(self) -> None:
        """Free everything that belongs to the instance."""

    async def freeze(self) -> None:
        """Stop the instance's processes where they are, so that they take no processor time. Fine if they are.

        If it is cancelled or raises, `thaw` must still bring the instance back to work.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be frozen.")

    async def thaw(self) -> None:
        """Let the instance's processes go on where `freeze` stopped them; return when they do. Fine if they do."""
        raise NotImplementedError(f"{type(self).__name__} cannot be frozen.")

    @classmethod
    async def prepare(cls, spec: Any) -> None:
        """Bring the prerequisites of a spec's instances to this machine, for instance an image.

        The engine calls it once for all specs with one ``preparation_key``. It is not called again during or after a
        success. It is called again after it failed or a start failed. It must be fast if everything is present.
        """
        raise NotImplementedError(f"{cls.__name__} has nothing to prepare, though its spec names a preparation.")

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

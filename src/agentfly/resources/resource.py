"""Resource: a live instance of a spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What a resource says of itself when the engine asks."""

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
    """

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

    @abstractmethod
    async def release(self) -> None:
        """Free everything that belongs to the instance."""

    @property
    def traces(self) -> dict[str, Any]:
        """What a later process needs to remove this instance should this process die: process ids, directories.

        JSON-able; empty while nothing of it would outlive this process. The engine writes it to the ledger before
        `start` and again after it. The kind's registered ``reap`` function gets it back.
        """
        return {}

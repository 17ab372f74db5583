"""ResourceSpec: a frozen, typed description of something that a tool or reward needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from agentfly.errors import ConfigError
from agentfly.resources.resource import Resource

R_co = TypeVar("R_co", bound=Resource, covariant=True)


class Scope(StrEnum):
    """How long a lease lasts."""

    CALL = "call"  # this tool call
    ROLLOUT = "rollout"  # until the rollout ends
    GLOBAL = "global"  # shared by many owners, until the engine closes or it idles out


@dataclass(frozen=True, kw_only=True)
class ResourceSpec(Generic[R_co]):
    """A frozen, hashable, picklable description of a resource. The whole spec is its pool's key.

    Two specs that differ in any field never share an instance. A new kind of resource is a subclass of this, a
    subclass of `Resource`, and a call of `agentfly.resources.registry.register`.

    Args:
        capacity: the most instances alive at once, counting those that start, reset or stop.
        warm: how many idle instances to keep ready.
        cpus: processor cores that an instance takes of the host's budget.
        memory: bytes, or a text such as ``"512MiB"``, that an instance takes of the host's budget and may use.
        gpus: graphics processors that an instance takes of the host's budget.
        max_concurrency: how many owners may hold one ``global`` instance at a time; None means any number.
        reuse: ``reset`` gives an instance to the next owner after a reset; ``recreate`` replaces it after each owner.
        max_uses: an instance is replaced after this many owners; None means never.
        start_timeout_s: seconds an instance may take to start before it counts as failed.
        reset_timeout_s: seconds a reset or health check may take before the instance is replaced.
        release_timeout_s: seconds an instance may take to go away in good order before it is forced, which may take
            as long again.
        idle_timeout_s: seconds an instance may stand idle before it is released, unless it is one of the ``warm``
            ones; None means for ever.
        check_interval_s: seconds between two health checks of an instance that is idle or leased; None means that
            it is checked only after a reset.

    Raises:
        ConfigError: a field has a value that cannot be.
    """

    capacity: int = 8
    warm: int = 0
    cpus: float = 0.0
    memory: int | str = 0
    gpus: float = 0.0
    max_concurrency: int | None = None
    reuse: Literal["reset", "recreate"] = "reset"
    max_uses: int | None = None
    start_timeout_s: float = 60.0
    reset_timeout_s: float = 30.0
    release_timeout_s: float = 10.0
    idle_timeout_s: float | None = 300.0
    check_interval_s: float | None = 30.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(
                f"{type(self).__name__}(capacity={self.capacity}): a pool needs a capacity of at least 1."
            )
        if not 0 <= self.warm <= self.capacity:
            raise ConfigError(
                f"{type(self).__name__}(warm={self.warm}): the warm count must lie between 0 and "
                f"the capacity of {self.capacity}."
            )
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise self._wrong(name, "an instance cannot take less than nothing of the host's budget")
        for name in ("max_concurrency", "max_uses"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise self._wrong(name, "give at least 1, or None for no limit")
        for name in ("start_timeout_s", "reset_timeout_s", "release_timeout_s", "idle_timeout_s", "check_interval_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise self._wrong(name, "give a number of seconds above 0")
        if self.reuse not in ("reset", "recreate"):
            raise self._wrong("reuse", "write 'reset' or 'recreate'")
        parse_bytes(self.memory)

    def _wrong(self, name: str, cure: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}({name}={getattr(self, name)!r}): {cure}.")

    @property
    def label(self) -> str:
        """A short name of the spec for people: events, errors, listings."""
        return type(self).__name__.removesuffix("Spec").lower()

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        return parse_bytes(self.memory)


_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as ``"512MiB"``, ``"2GB"`` or ``1024``.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    unit = text[len(number) :].strip()
    try:
        count = int(float(number) * _UNITS[unit])
        if count < 0:
            raise ValueError(size)
        return count
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{size!r} is not a size in bytes. Write a number and a unit, for instance '512MiB' or '2GB'."
        ) from None

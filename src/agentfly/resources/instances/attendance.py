"""Attendance: who has an instance, who uses it at the moment, and for how long that was so in all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from agentfly.errors import ResourceDied, UsageError
from agentfly.resources.instances.meter import Meter
from agentfly.resources.instances.parking import Parking
from agentfly.resources.resource import Resource, Status


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How much of their time instances were of use, added up over instances.

    Attributes:
        leases: how many leases there were.
        alive_seconds: from before their starts until they were gone.
        held_seconds: somebody had leased them.
        busy_seconds: at least one method that an owner called was running. What of the held time is not busy was
            spent on other things, such as generation.
    """

    leases: int = 0
    alive_seconds: float = 0.0
    held_seconds: float = 0.0
    busy_seconds: float = 0.0

    def __add__(self, other: Occupancy) -> Occupancy:
        return Occupancy(
            self.leases + other.leases,
            self.alive_seconds + other.alive_seconds,
            self.held_seconds + other.held_seconds,
            self.busy_seconds + other.busy_seconds,
        )

    def __sub__(self, other: Occupancy) -> Occupancy:
        return Occupancy(
            self.leases - other.leases,
            self.alive_seconds - other.alive_seconds,
            self.held_seconds - other.held_seconds,
            self.busy_seconds - other.busy_seconds,
        )


class Attendance:
    """Who has one instance, and who uses it.

    Args:
        resource: the instance.
        parks: whether it is frozen while nobody uses it.
        in_call: whether an owner has a call under way, which may use it any time.
        lost: called when it cannot be thawed.
        check: has the instance asked how it is.
    """

    def __init__(
        self,
        resource: Resource,
        *,
        parks: bool,
        in_call: Callable[[str], bool],
        lost: Callable[[Exception], None],
        check: Callable[[], asyncio.Task[Status]],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.busy = Meter(self.loop.time)
        self.parking = Parking(resource, self._is_quiet, lost) if parks else None
        self._in_call = in_call
        self._check = check
        self._checking: asyncio.Task[Status] | None = None
        self._held = Meter(self.loop.time)
        self._leases = 0
        self._owners: dict[Use, str] = {}
        self._since = self.loop.time()

    @property
    def frozen(self) -> bool:
        """Whether the instance is frozen."""
        return self.parking is not None and self.parking.frozen

    @property
    def is_held(self) -> bool:
        """Whether somebody has leased it."""
        return bool(self._owners)

    @property
    def occupancy(self) -> Occupancy:
        """How much of its time the instance was of use so far."""
        alive = self.loop.time() - self._since
        return Occupancy(self._leases, alive, self._held.seconds, self.busy.seconds)

    def leased(self, owner: str) -> Use:
        """Somebody has leased it, and uses it by way of what is returned, until they close that."""
        use = Use(self)
        self._owners[use] = owner
        self._leases += 1
        self._held.begin()
        return use

    def left(self, use: Use) -> None:
        """A lease is over."""
        del self._owners[use]
        self._held.end()
        self.rest()

    def doubt(self) -> None:
        """Something that an owner called says that the instance is gone: nobody else should wait to find out."""
        if self._checking is None or self._checking.done():
            self._checking = self._check()

    def rest(self) -> None:
        """Perhaps nobody needs it now."""
        if self.parking is not None:
            self.parking.rest()

    async def __aenter__(self) -> Self:
        """The engine is about to do something with the instance, which must run for it."""
        if self.parking is not None:
            self.parking.begin()
            try:
                await self.parking.running()
            except BaseException:
                self.parking.end()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.parking is not None:
            self.parking.end()

    async def close(self, within_s: float) -> None:
        """The instance is about to be removed."""
        if self.parking is not None:
            await self.parking.close(within_s)

    def _is_quiet(self) -> bool:
        return not any(self._in_call(owner) for owner in self._owners.values())


class Use:
    """One lease's use of its instance. A coroutine that the owner calls runs in ``async with use``.

    Attributes:
        busy: counts while something that the owner called is running.
    """

    def __init__(self, attendance: Attendance) -> None:
        self.busy = Meter(attendance.loop.time, attendance.busy)
        self._attendance = attendance
        self._parking = attendance.parking
        self._inside = 0
        self._over = False

    async def __aenter__(self) -> Self:
        if asyncio.get_running_loop() is not self._attendance.loop:
            raise UsageError(
                "A resource is used in the event loop of its engine, and this is another one. From a sync tool, which "
                "runs on a thread, write context.wait(box.run(…))."
            )
        if self._parking is not None:
            await self._have_it_run(self._parking)
        self.busy.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.busy.end()
        self._leave()
        if kind is not None and issubclass(kind, ResourceDied) and not self._over:
            self._attendance.doubt()

    def close(self) -> None:
        """The lease is over. What still runs is not waited for, and counts no more."""
        self.busy.stop()
        self._over = True
        if self._parking is not None:
            for _ in range(self._inside):
                self._parking.end()
        self._attendance.left(self)

    async def _have_it_run(self, parking: Parking) -> None:
        self._inside += 1
        parking.begin()
        try:
            await parking.running()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._parking is not None and not self._over:
            self._inside -= 1
            self._parking.end()

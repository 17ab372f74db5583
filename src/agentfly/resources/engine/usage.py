"""Usage of instances: active calls, lease and busy times, and the freezing of idle instances."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Self

from agentfly.core.errors import ResourceDied, UsageError
from agentfly.resources.engine.freezer import IdleFreezer
from agentfly.resources.resource import Resource, Status


class BusyTimer:
    """Adds up the seconds in which at least one of something goes on. Any thread may use it.

    Args:
        clock: the time in seconds.
        whole: a meter of which this one is a part: it runs while any of its parts does.
    """

    def __init__(self, clock: Callable[[], float], whole: BusyTimer | None = None) -> None:
        self._clock = clock
        self._whole = whole
        self._lock: Lock = whole._lock if whole is not None else Lock()  # one for both, which change together
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        """How long it has been in all, what goes on now included."""
        with self._lock:
            return self._seconds + (self._clock() - self._since if self._under_way else 0.0)

    def begin(self) -> None:
        """One more goes on."""
        with self._lock:
            self._one_more(self._clock())

    def end(self) -> None:
        """One of them is over."""
        with self._lock:
            self._one_less(self._clock())

    def stop(self) -> None:
        """Count nothing any more: neither what goes on still nor what begins."""
        with self._lock:
            if not self._stopped and self._under_way:
                self._under_way = 1
                self._one_less(self._clock())
            self._stopped = True

    def _one_more(self, now: float) -> None:
        if self._stopped:
            return
        self._under_way += 1
        if self._under_way == 1:
            self._since = now
            if self._whole is not None:
                self._whole._one_more(now)

    def _one_less(self, now: float) -> None:
        if self._stopped:
            return
        self._under_way -= 1
        if not self._under_way:
            self._seconds += now - self._since
            if self._whole is not None:
                self._whole._one_less(now)


class ActiveCalls:
    """The calls that are under way.

    Args:
        over: told of each owner whose last call has ended.
    """

    def __init__(self, over: Callable[[str], None]) -> None:
        self._over = over
        self._under_way: Counter[str] = Counter()

    def __contains__(self, owner: str) -> bool:
        return owner in self._under_way

    def track(self, owner: str) -> ActiveCall:
        """A call of an owner, as a block."""
        return ActiveCall(self, owner)


class ActiveCall:
    """A call, under way while its block runs."""

    __slots__ = ("_calls", "_owner")

    def __init__(self, calls: ActiveCalls, owner: str) -> None:
        self._calls = calls
        self._owner = owner

    def __enter__(self) -> None:
        self._calls._under_way[self._owner] += 1

    def __exit__(self, *_: object) -> None:
        calls, owner = self._calls, self._owner
        calls._under_way[owner] -= 1
        if not calls._under_way[owner]:
            del calls._under_way[owner]
            calls._over(owner)


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


class InstanceUsage:
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
        self.busy = BusyTimer(self.loop.time)
        self.parking = IdleFreezer(resource, self._has_no_active_call, lost) if parks else None
        self._in_call = in_call
        self._check = check
        self._checking: asyncio.Task[Status] | None = None
        self._held = BusyTimer(self.loop.time)
        self._leases = 0
        self._owners: dict[LeaseUsage, str] = {}
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

    def begin_lease(self, owner: str) -> LeaseUsage:
        """Somebody has leased it, and uses it by way of what is returned, until they close that."""
        use = LeaseUsage(self)
        self._owners[use] = owner
        self._leases += 1
        self._held.begin()
        return use

    def end_lease(self, use: LeaseUsage) -> None:
        """A lease is over."""
        del self._owners[use]
        self._held.end()
        self.maybe_freeze()

    def request_check(self) -> None:
        """Something that an owner called says that the instance is gone: nobody else should wait to find out."""
        if self._checking is None or self._checking.done():
            self._checking = self._check()

    def maybe_freeze(self) -> None:
        """Perhaps nobody needs it now."""
        if self.parking is not None:
            self.parking.maybe_freeze()

    async def __aenter__(self) -> Self:
        """The engine is about to do something with the instance, which must run for it."""
        if self.parking is not None:
            self.parking.begin_use()
            try:
                await self.parking.wait_running()
            except BaseException:
                self.parking.end_use()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.parking is not None:
            self.parking.end_use()

    async def close(self, within_s: float) -> None:
        """The instance is about to be removed."""
        if self.parking is not None:
            await self.parking.close(within_s)

    def _has_no_active_call(self) -> bool:
        return not any(self._in_call(owner) for owner in self._owners.values())


class LeaseUsage:
    """One lease's use of its instance. A coroutine that the owner calls runs in ``async with use``.

    Attributes:
        busy: counts while something that the owner called is running.
    """

    def __init__(self, attendance: InstanceUsage) -> None:
        self.busy = BusyTimer(attendance.loop.time, attendance.busy)
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
            await self._thaw(self._parking)
        self.busy.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.busy.end()
        self._leave()
        if kind is not None and issubclass(kind, ResourceDied) and not self._over:
            self._attendance.request_check()

    def close(self) -> None:
        """The lease is over. What still runs is not waited for, and counts no more."""
        self.busy.stop()
        self._over = True
        if self._parking is not None:
            for _ in range(self._inside):
                self._parking.end_use()
        self._attendance.end_lease(self)

    async def _thaw(self, parking: IdleFreezer) -> None:
        self._inside += 1
        parking.begin_use()
        try:
            await parking.wait_running()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._parking is not None and not self._over:
            self._inside -= 1
            self._parking.end_use()

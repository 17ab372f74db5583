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
    """Adds up the seconds in which at least one operation runs. Thread-safe.

    Args:
        clock: returns the time in seconds.
        total: a timer that also runs while this one does.

    Attributes:
        lock: guards this timer and ``total``, because both change together.
    """

    def __init__(self, clock: Callable[[], float], total: BusyTimer | None = None) -> None:
        self.lock: Lock = Lock() if total is None else total.lock
        self._clock = clock
        self._total = total
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        """The total, including running operations."""
        with self.lock:
            return self._seconds + (self._clock() - self._since if self._running else 0.0)

    def begin(self) -> None:
        """An operation begins."""
        with self.lock:
            self.begin_locked(self._clock())

    def end(self) -> None:
        """An operation ends."""
        with self.lock:
            self.end_locked(self._clock())

    def stop(self) -> None:
        """Stop counting, also for running operations."""
        with self.lock:
            if not self._stopped and self._running:
                self._running = 1
                self.end_locked(self._clock())
            self._stopped = True

    def begin_locked(self, now: float) -> None:
        """An operation begins at ``now``. The caller holds `lock`."""
        if self._stopped:
            return
        self._running += 1
        if self._running == 1:
            self._since = now
            if self._total is not None:
                self._total.begin_locked(now)

    def end_locked(self, now: float) -> None:
        """An operation ends at ``now``. The caller holds `lock`."""
        if self._stopped:
            return
        self._running -= 1
        if not self._running:
            self._seconds += now - self._since
            if self._total is not None:
                self._total.end_locked(now)


class ActiveCalls:
    """The running calls, by owner.

    Args:
        on_idle: called with an owner when its last call has ended.
    """

    def __init__(self, on_idle: Callable[[str], None]) -> None:
        self._on_idle = on_idle
        self._running: Counter[str] = Counter()

    def __contains__(self, owner: str) -> bool:
        return owner in self._running

    def track(self, owner: str) -> ActiveCall:
        """Return a context manager that counts as a call of an owner."""
        return ActiveCall(self, owner)

    def begin(self, owner: str) -> None:
        """A call of an owner begins."""
        self._running[owner] += 1

    def end(self, owner: str) -> None:
        """A call of an owner ends."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
            self._on_idle(owner)


class ActiveCall:
    """A call that is active within the ``with`` block."""

    __slots__ = ("_calls", "_owner")

    def __init__(self, calls: ActiveCalls, owner: str) -> None:
        self._calls = calls
        self._owner = owner

    def __enter__(self) -> None:
        self._calls.begin(self._owner)

    def __exit__(self, *_: object) -> None:
        self._calls.end(self._owner)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Time in which instances were alive, held and busy, summed over instances.

    Attributes:
        leases: number of leases.
        alive_seconds: time from before the start until the instance was gone.
        held_seconds: time with at least one lease.
        busy_seconds: time in which at least one method called by an owner ran. The rest of the held time went to
            other things, such as generation.
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
    """The leases and uses of one instance.

    Args:
        resource: the instance.
        freeze_when_idle: whether to freeze it while no one uses it.
        in_call: whether an owner has a running call, which may use the instance at any time.
        on_dead: called if it cannot be thawed.
        check: starts a health check of the instance.
    """

    def __init__(
        self,
        resource: Resource,
        *,
        freeze_when_idle: bool,
        in_call: Callable[[str], bool],
        on_dead: Callable[[Exception], None],
        check: Callable[[], asyncio.Task[Status]],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.busy = BusyTimer(self.loop.time)
        self.freezer = IdleFreezer(resource, self._has_no_active_call, on_dead) if freeze_when_idle else None
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
        return self.freezer is not None and self.freezer.frozen

    @property
    def is_held(self) -> bool:
        """Whether the instance is leased."""
        return bool(self._owners)

    @property
    def occupancy(self) -> Occupancy:
        """The occupancy of the instance so far."""
        alive = self.loop.time() - self._since
        return Occupancy(self._leases, alive, self._held.seconds, self.busy.seconds)

    def begin_lease(self, owner: str) -> LeaseUsage:
        """Begin a lease. Uses of the instance go through the returned object until it is closed."""
        use = LeaseUsage(self)
        self._owners[use] = owner
        self._leases += 1
        self._held.begin()
        return use

    def end_lease(self, use: LeaseUsage) -> None:
        """A lease has ended."""
        del self._owners[use]
        self._held.end()
        self.maybe_freeze()

    def request_check(self) -> None:
        """Check the instance now, because a call of an owner found it dead."""
        if self._checking is None or self._checking.done():
            self._checking = self._check()

    def maybe_freeze(self) -> None:
        """Freeze the instance soon if no one needs it."""
        if self.freezer is not None:
            self.freezer.maybe_freeze()

    async def __aenter__(self) -> Self:
        """Thaw the instance for an operation of the engine."""
        if self.freezer is not None:
            self.freezer.begin_use()
            try:
                await self.freezer.wait_running()
            except BaseException:
                self.freezer.end_use()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.freezer is not None:
            self.freezer.end_use()

    async def close(self, within_s: float) -> None:
        """Thaw the instance before its removal."""
        if self.freezer is not None:
            await self.freezer.close(within_s)

    def _has_no_active_call(self) -> bool:
        return not any(self._in_call(owner) for owner in self._owners.values())


class LeaseUsage:
    """The use of an instance by one lease. Coroutines that the owner calls run in ``async with use``.

    Attributes:
        busy: the timer of the owner's running calls.
    """

    def __init__(self, usage: InstanceUsage) -> None:
        self.busy = BusyTimer(usage.loop.time, usage.busy)
        self._usage = usage
        self._freezer = usage.freezer
        self._inside = 0
        self._over = False

    async def __aenter__(self) -> Self:
        if asyncio.get_running_loop() is not self._usage.loop:
            raise UsageError(
                "A resource is used in the event loop of its engine, and this is another one. From a sync tool, which "
                "runs on a thread, write context.wait(box.run(…))."
            )
        if self._freezer is not None:
            await self._thaw(self._freezer)
        self.busy.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.busy.end()
        self._leave()
        if kind is not None and issubclass(kind, ResourceDied) and not self._over:
            self._usage.request_check()

    def close(self) -> None:
        """End the lease. Running calls are not waited for and stop counting."""
        self.busy.stop()
        self._over = True
        if self._freezer is not None:
            for _ in range(self._inside):
                self._freezer.end_use()
        self._usage.end_lease(self)

    async def _thaw(self, freezer: IdleFreezer) -> None:
        self._inside += 1
        freezer.begin_use()
        try:
            await freezer.wait_running()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._freezer is not None and not self._over:
            self._inside -= 1
            self._freezer.end_use()

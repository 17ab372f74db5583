"""ResourceEngine: the one scheduler of all pools, and the async shell around its decisions."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from agentfly.core.async_tasks import require_running_loop, wait_uninterrupted
from agentfly.core.errors import ConfigError, ResourceError, UsageError, error_message
from agentfly.core.events import EventStream, LeaseGranted, LeaseRefused, LeaseReleased, LeaseRequested, ResourceEvent
from agentfly.core.numbers import is_finite_number
from agentfly.core.signals import defer_sigint
from agentfly.core.user_directories import state_directory
from agentfly.resources.engine import orphans
from agentfly.resources.engine.controller import InstanceController
from agentfly.resources.engine.instances import LiveInstances
from agentfly.resources.engine.lease import Lease, PendingAcquire, create_handle, revoke
from agentfly.resources.engine.preparation import Preparer
from agentfly.resources.engine.status import EngineSnapshot, take_snapshot
from agentfly.resources.engine.status_socket import StatusSocket
from agentfly.resources.engine.usage import ActiveCall, ActiveCalls, Occupancy
from agentfly.resources.process.ledger import Ledger
from agentfly.resources.resource import Resource, Scope, Status
from agentfly.resources.scheduler.budget import Budget
from agentfly.resources.scheduler.decisions import (
    BackOffStarts,
    CheckInstance,
    Decision,
    EndHold,
    GrantRequest,
    RejectRequest,
    ResetInstance,
    StartInstance,
    StopInstance,
)
from agentfly.resources.scheduler.pool import AcquireRequest, Hold
from agentfly.resources.scheduler.scheduler import Scheduler
from agentfly.resources.spec import ResourceSpec, validate_spec

__all__ = ["Budget", "ResourceEngine"]

logger = logging.getLogger(__name__)

STARTS_PER_CORE = 8
"""Default number of concurrent starts per processor core. Starts mostly wait for disks and programs."""

R = TypeVar("R", bound=Resource)


class ResourceEngine:
    """Acquires resources for owners, shares them, and ensures that all of them are released in the end.

    Use it as ``async with ResourceEngine() as engine``. Entering removes orphans of dead processes. Leaving releases
    everything, however the block ends, in bounded time. An engine belongs to the event loop in which it was entered.

    Args:
        budget: the part of the host that all instances together may use; by default without limit.
        ledger: the directory for the ledger of running instances, with which a later process can remove them if this
            one is killed; by default ``$AGENTFLY_STATE_DIR`` or the user's state directory.
        events: receives the events.
        max_concurrent_starts: maximum number of concurrent starts. By default `STARTS_PER_CORE` per processor core of
            this process; a start with a new interpreter counts as four, and one by the daemon of a container engine as
            two.

    Raises:
        ConfigError: an argument has another type, or ``max_concurrent_starts`` is not a whole number of at least 1.
    """

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        ledger: Path | str | None = None,
        events: EventStream | None = None,
        max_concurrent_starts: int | None = None,
    ) -> None:
        ledger = Path(ledger) if isinstance(ledger, str) else ledger
        kinds = {"budget": (budget, Budget), "ledger": (ledger, Path), "events": (events, EventStream)}
        for name, (value, wanted) in kinds.items():
            if value is not None and not isinstance(value, wanted):
                raise ConfigError(
                    f"ResourceEngine({name}={value!r:.100}): it must be of the type {wanted.__name__}, or None."
                )
        starts = max_concurrent_starts
        if starts is not None and (not isinstance(starts, int) or isinstance(starts, bool) or starts < 1):
            raise ConfigError(
                f"ResourceEngine(max_concurrent_starts={starts!r}): write a whole number of at least 1, or None, which "
                f"means {STARTS_PER_CORE} per processor core."
            )
        self._directory = state_directory(ledger)
        self._events = events
        self._calls = ActiveCalls(self._last_call_ended)
        self._instances = LiveInstances(
            Ledger(self._directory), StatusSocket(lambda: self.snapshot().to_json()), in_call=self._calls.__contains__
        )
        self._scheduler = Scheduler(
            budget=budget,
            max_concurrent_starts=starts or STARTS_PER_CORE * len(os.sched_getaffinity(0)),
            weighed=starts is None,
            name=uuid.uuid4().hex[:8],
        )
        self._preparer = Preparer(self._emit)
        self._controller = InstanceController(
            self._scheduler, self._instances, self._preparer, self._execute, self._emit
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._request_ids = count(1)
        self._pending: dict[int, PendingAcquire] = {}
        self._leases: dict[int, Lease[Any]] = {}
        self._decisions: deque[Decision] = deque()
        self._executing = False
        self._tick_timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("A ResourceEngine can be entered only once. Create another one.")
        self._loop = asyncio.get_running_loop()
        try:
            for orphan in await orphans.reap_orphans(self._directory):
                logger.info("Removed %s (%s), which a dead process left behind.", orphan.instance, orphan.kind)
        except OSError as error:
            logger.warning("Could not search %s for orphans of dead processes: %s", self._directory, error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # --- what owners call ---------------------------------------------------------------------------------------------

    async def acquire(
        self,
        spec: ResourceSpec[R],
        owner: str,
        *,
        scope: Scope | str = Scope.ROLLOUT,
        timeout: float | None = None,
        priority: int = 0,
        callers: tuple[Hashable, ...] = (),
    ) -> Lease[R]:
        """Lease a live instance of ``spec``. Wait while none is available.

        Args:
            spec: the resource.
            owner: the owner of the lease. The same owner, spec and scope get the same lease, also concurrently, unless
                the scope is ``call``.
            scope: ``rollout`` and ``call`` instances have one owner at a time; ``global`` ones have several.
            timeout: maximum wait in seconds; None for no limit.
            priority: higher priorities are served first.
            callers: the tasks that wait for the result, for instance a tool call and the requesting task in it; by
                default the running task. An instance held for a call is released when the first of its callers ends, so
                never while a request of that caller waits. This distinguishes a deadlock from concurrent calls.

        Raises:
            AcquireTimeout: nothing became free in time; the message lists the holders.
            ResourceStartError: the instance started for this request failed to start.
            ResourceDied: the owner's instance is gone, with the owner's data in it.
            DeadlockBroken: the wait could never have ended.
            EngineClosed: the engine is closed.
            ConfigError: the spec exceeds the whole budget.
            UsageError: the spec's class names no kind; the spec cannot be hashed; ``timeout`` is not a number of
                seconds; or this is not the engine's event loop.
        """
        validate_spec(spec)
        (lease,) = await self._acquire((spec,), owner, Scope(scope), timeout, priority, callers)
        return lease

    async def acquire_all(
        self,
        specs: Sequence[ResourceSpec[Any]],
        owner: str,
        *,
        timeout: float | None = None,
        priority: int = 0,
        callers: tuple[Hashable, ...] = (),
    ) -> tuple[Lease[Any], ...]:
        """Lease one instance of each of ``specs`` with scope ``rollout``: all at once, when all are available.

        Until then the owner holds none of them, so that owners with several specs cannot block one another. The request
        has a position in the queue like any other: an instance that becomes free for it is not given to a later
        request. Instances that the owner already has count as available.

        The other arguments and the errors are those of `acquire`. After an error the owner has no more instances than
        before.
        """
        for spec in specs:
            validate_spec(spec)
        wanted = tuple(dict.fromkeys(specs))
        leases = await self._acquire(wanted, owner, Scope.ROLLOUT, timeout, priority, callers) if wanted else ()
        return tuple(leases[wanted.index(spec)] for spec in specs)

    async def release(self, lease: Lease[Any]) -> None:
        """End a lease at once. The instance is reset or stopped in the background. A second call does nothing."""
        loop = self._own_loop()
        if self._leases.get(lease.id) is lease:
            self._execute(self._scheduler.released(lease.id, loop.time()))

    async def release_owner(self, owner: str) -> None:
        """End every lease of an owner at once, and fail its waiting requests."""
        loop = self._own_loop()
        self._execute(self._scheduler.owner_released(owner, loop.time()))

    def active_call(self, owner: str) -> ActiveCall:
        """Return a context manager for a call of an owner.

        Its leased instances are not frozen between uses in the call.
        """
        return self._calls.track(owner)

    def prefetch(self, specs: Iterable[ResourceSpec[Any]]) -> None:
        """Prepare for specs that will be needed soon: fetch images, and start ``warm`` instances.

        Return at once. Failures are logged, and the next acquire tries again.

        Raises:
            UsageError: a spec's class names no kind; a spec cannot be hashed; or this is not the engine's event loop.
        """
        loop = self._own_loop()
        self._preparer.prefetch(specs, lambda spec: self._execute(self._scheduler.prefetched(spec, loop.time())))

    async def check(self, lease: Lease[Any]) -> Status:
        """Check the health of a leased resource. A broken instance is replaced at once."""
        self._own_loop()
        if self._leases.get(lease.id) is not lease:
            return Status.BROKEN
        task = self._controller.check(lease.instance, lease.spec)
        await asyncio.wait({task})
        return task.result()

    async def close(self) -> None:
        """Release everything. Waiting requests fail with `EngineClosed`. Return when all is gone, even if cancelled.

        Instances that cannot be removed are logged and stay in the ledger for a later process.
        """
        if self._loop is None:
            return
        loop = self._own_loop()
        if self._closing is None:
            self._closing = loop.create_task(self._shut_down(), name="close the resource engine")
        with defer_sigint():
            await wait_uninterrupted({self._closing})
        self._closing.result()

    async def _acquire(
        self,
        specs: tuple[ResourceSpec[Any], ...],
        owner: str,
        scope: Scope,
        timeout: float | None,
        priority: int,
        callers: tuple[Hashable, ...],
    ) -> tuple[Lease[Any], ...]:
        loop = self._own_loop()
        if timeout is not None and not (is_finite_number(timeout) and timeout >= 0):
            raise UsageError(
                f"acquire(timeout={timeout!r}): write the maximum number of seconds to wait, a finite number of at "
                "least 0 without quotes; or None for no limit."
            )
        now = loop.time()
        request = AcquireRequest(
            id=next(self._request_ids),
            specs=specs,
            owner=owner,
            scope=scope,
            priority=priority,
            callers=callers or (asyncio.current_task(),),
            deadline=None if timeout is None else now + timeout,
        )
        pending = self._pending[request.id] = PendingAcquire(specs, loop)
        fields: dict[str, Any] = {"owner": owner, "scope": scope.value}
        for spec in specs:
            self._emit(LeaseRequested, spec, **fields)
        try:
            self._execute(self._scheduler.requested(request, now))
            leases = await pending.leases()
            if gone := next((lease for lease in leases if lease.id not in self._leases), None):
                raise ResourceError(
                    f"{owner} was granted {gone.instance}, but the lease ended before {owner} received it."
                )
        except BaseException as error:
            self._cancel_request(request, pending)
            fields["error"] = "cancelled" if isinstance(error, asyncio.CancelledError) else error_message(error)
            for spec in specs:
                self._emit(LeaseRefused, spec, **fields, waited_seconds=loop.time() - now)
            raise
        finally:
            del self._pending[request.id]
        waited = loop.time() - now
        for lease in leases:
            self._emit(LeaseGranted, lease.spec, **fields, instance=lease.instance, waited_seconds=waited)
        return leases

    def _cancel_request(self, request: AcquireRequest, pending: PendingAcquire) -> None:
        """Cancel a request. If it was granted in the meantime, release its leases."""
        self._execute(self._scheduler.cancelled(request.id, self._now()))
        for lease in pending.received:
            self._execute(self._scheduler.declined(lease.id, self._now()))

    def snapshot(self) -> EngineSnapshot:
        """Return the state of all pools: instances with states, owners and ages, and the queues."""
        return take_snapshot(self._scheduler, self._instances, 0.0 if self._loop is None else self._loop.time())

    def occupancy(self) -> dict[str, Occupancy]:
        """Return leased and busy time by the labels of specs. Removed instances count too."""
        return self._instances.occupancy()

    # --- execution of the scheduler's decisions -----------------------------------------------------------------------

    def _execute(self, decisions: list[Decision]) -> None:
        self._decisions.extend(decisions)
        if self._executing:
            return  # the running loop executes them after the earlier decisions
        self._executing = True
        try:
            while self._decisions:
                self._execute_one(self._decisions.popleft())
        finally:
            self._executing = False
        self._schedule_tick()

    def _execute_one(self, decision: Decision) -> None:
        match decision:
            case GrantRequest(request=request, holding=holding):
                self._grant(request, holding)
            case RejectRequest(request=request, error=error):
                if (pending := self._pending.get(request)) is not None:
                    pending.fail(error)
            case EndHold(holding=holding):
                self._end(holding)
            case ResetInstance(instance=name, spec=spec):
                self._controller.reset(name, spec)
            case StartInstance(instance=name, spec=spec):
                self._controller.start(name, spec)
            case CheckInstance(instance=name, spec=spec):
                self._controller.check(name, spec)
            case StopInstance(instance=name, spec=spec):
                self._controller.stop(name, spec)
            case BackOffStarts():
                self._controller.starts_backed_off(decision)

    def _grant(self, request: int, holding: Hold) -> None:
        lease = self._leases.get(holding.id)
        if lease is None:
            if holding.died_undelivered or self._replace_if_dead(holding):
                return
            name, spec = holding.instance.name, holding.instance.pool.spec
            resource = create_handle(
                self._instances[name], holding.owner, self._instances.begin_lease(name, holding.owner)
            )
            lease = Lease(resource, holding.owner, spec, holding.scope, name, holding.id)
            self._leases[holding.id] = lease
        pending = self._pending.get(request)
        if pending is None or not pending.add(lease):  # the request was cancelled just before
            self._execute(self._scheduler.declined(holding.id, self._now()))

    def _replace_if_dead(self, holding: Hold) -> bool:
        """Check an instance before its hand-out. Return whether it is dead and another one is requested."""
        instance = holding.instance
        if (error := self._instances.quick_check(instance.name)) is not None:
            self._controller.instance_died(instance.name, instance.pool.spec, error)
            return True
        self._scheduler.delivered(holding)
        return False

    def _end(self, holding: Hold) -> None:
        if (lease := self._leases.pop(holding.id, None)) is not None:
            busy = revoke(lease.resource)
            self._emit(
                LeaseReleased,
                lease.spec,
                owner=lease.owner,
                scope=lease.scope.value,
                instance=lease.instance,
                held_seconds=self._now() - holding.since,
                busy_seconds=busy,
            )

    def _last_call_ended(self, owner: str) -> None:
        """An owner's last call is over."""
        holder = self._scheduler.owners.get(owner)
        for holding in () if holder is None else holder.holdings.values():
            if (usage := self._instances.usage(holding.instance.name)) is not None:
                usage.maybe_freeze()

    def _emit(self, event: type[ResourceEvent], spec: ResourceSpec[Any], **fields: Any) -> None:
        if self._events is not None:
            self._events.emit(event(pool=spec.label, **fields))

    # --- timers and shutdown ------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        self._preparer.stop()
        self._execute(self._scheduler.closed(self._now()))
        try:
            await self._controller.join()
            await self._preparer.join()
        finally:
            if self._tick_timer is not None:
                self._tick_timer.cancel()
            await self._instances.close()

    def _schedule_tick(self) -> None:
        """Schedule the next tick of the scheduler, for its next due time."""
        due = self._scheduler.next_tick()
        if (
            due is None
            or self._closing is not None
            or (self._tick_timer is not None and self._tick_timer.when() <= due)
        ):
            return
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._tick_timer = self._own_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        self._execute(self._scheduler.tick(self._now()))

    def _now(self) -> float:
        assert self._loop is not None  # only called once entered
        return self._loop.time()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise UsageError(
                "A ResourceEngine must be used inside its block: `async with ResourceEngine() as engine:`."
            )
        require_running_loop(self._loop, "ResourceEngine")
        return self._loop

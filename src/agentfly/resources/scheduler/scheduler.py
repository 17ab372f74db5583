"""The scheduler: a pure state machine that grants instances and decides which instances start, reset and stop.

Its public methods are events. Each takes the time ``now`` and returns the decisions to carry out. Without I/O, clock
and concurrency, tests can drive long random histories through it.

The life cycle of an instance::

    Start ── started ──→ idle ── Grant ──→ leased ── released ──→ Reset ── reset_done ──→ idle
      └ start_failed       └ no longer      └ died                  └ reset_failed
                             wanted
      └───────────────────┴────────────────┴───────────────────────┴──→ Stop ── stopped ──→ gone

The policy:

* A pool serves waiters by priority, then by arrival. A later request never overtakes.
* A request for several specs is granted all instances at once, and holds none before. Instances that become free in
  its turn are reserved for it. Such requests have the same order in all queues, so none waits for a later one.
* Instances start for unserved waiters, within the pool's capacity, the budget and the limit on concurrent starts.
  Owners that already hold something start first, because only they can block each other. Then follows the pool with
  the oldest unserved waiter, and none overtakes it.
* When the budget is short, idle instances are evicted, the longest idle first. A pool that is never idle gives up an
  instance for a request of another pool that is older than its own and has waited for `provisioner.EVICTION_WAIT_S`.
* Failed starts back off (`backoff`). Requests keep waiting through transient failures and fail only after some seconds
  of them. A permanent failure at once fails the requests that the instance would have served, unless other instances
  are becoming ready for them.
* If the instance of a rollout dies, the rollout does not silently get a replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentfly.core.errors import AgentFlyError
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler import decisions
from agentfly.resources.scheduler.backoff import FailureScope
from agentfly.resources.scheduler.budget import Budget, BudgetUsage
from agentfly.resources.scheduler.deadlock import (
    DeadlockSet,
    WaitGraph,
    deadlock_error,
    find_deadlock,
    reserved_waiters,
    youngest_holder,
)
from agentfly.resources.scheduler.decisions import Decision
from agentfly.resources.scheduler.pool import AcquireRequest, Hold, Instance, InstancePool, InstanceState, Owner, Waiter
from agentfly.resources.scheduler.provisioner import Provisioner
from agentfly.resources.scheduler.state import SchedulerState
from agentfly.resources.spec import ResourceSpec

DEADLOCK_CHECK_INTERVAL_S = 1.0
"""Seconds between two searches for deadlocks that were not caused by a request."""

_DEADLOCK_CHECK = object()


class Scheduler:
    """Decides for all pools of one engine.

    Args:
        budget: the part of the host that all instances together may use.
        max_concurrent_starts: maximum number of concurrent starts.
        weighed: whether a start counts with its spec's ``start_weight`` instead of 1.
        name: a part of instance names that makes them unique on the machine.
    """

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        max_concurrent_starts: int = 8,
        weighed: bool = False,
        name: str = "engine",
    ) -> None:
        self._state = SchedulerState()
        self._provisioner = Provisioner(self._state, budget or Budget(), max_concurrent_starts, weighed, name)
        self._wait_graph = WaitGraph(self._state, self._provisioner)
        self._check_scheduled = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def requested(self, request: AcquireRequest, now: float) -> list[Decision]:
        """A request arrives, for an instance of each of its specs."""
        state, pools = self._state, [self._state.pool(spec) for spec in request.specs]
        if self._provisioner.closed:
            state.reject(request.id, decisions.engine_closed(request.owner, request.label))
        elif (excess := self._provisioner.excess(pools)) is not None:
            state.reject(request.id, decisions.exceeds_budget(request, excess))
        else:
            for pool in pools:
                state.note_demand(pool, now)
            self._handle_request(request, pools, now)
        for pool in pools:
            state.forget_if_empty(pool)
        return self._take_decisions(now)

    def prefetched(self, spec: ResourceSpec[Any], now: float) -> list[Decision]:
        """Requests are expected soon: start the warm instances of a spec where possible."""
        if not self._provisioner.closed:
            pool = self._state.pool(spec)
            self._state.note_demand(pool, now)
            self._serve_pool(pool, now)
        return self._take_decisions(now)

    def cancelled(self, request: int, now: float) -> list[Decision]:
        """A request was cancelled. Does nothing if it has been answered."""
        if (siblings := self._state.waiters.get(request)) is not None:
            self._state.withdraw(siblings[0].requests[request])
            self._serve_all(siblings, now)
        return self._take_decisions(now)

    def declined(self, holding: int, now: float) -> list[Decision]:
        """A grant could not be delivered, because its request was cancelled."""
        if (held := self._state.holdings.get(holding)) is not None:
            held.request_count -= 1
            if held.request_count == 0:
                self._release(held, now)
        return self._take_decisions(now)

    def released(self, holding: int, now: float) -> list[Decision]:
        """An owner releases a hold. Does nothing if the hold has ended."""
        if (held := self._state.holdings.get(holding)) is not None:
            self._release(held, now)
        return self._take_decisions(now)

    def owner_released(self, name: str, now: float) -> list[Decision]:
        """An owner releases all holds, and its waiting requests fail."""
        if (owner := self._state.owners.get(name)) is not None:
            waiters = list(owner.waiters.values())
            for waiter in waiters:
                self._state.fail(waiter, partial(decisions.owner_ended, name, _label(waiter.siblings)))
            for held in list(owner.holdings.values()):
                self._release(held, now)
            self._serve_all(waiters, now)
        return self._take_decisions(now)

    # --- instances ----------------------------------------------------------------------------------------------------

    def started(self, name: str, now: float) -> list[Decision]:
        """An instance has started."""
        if (instance := self._state.in_state(name, InstanceState.STARTING)) is not None:
            self._provisioner.started(instance, now)
            self._became_idle(instance, now)
            self._provisioner.start_all_possible(now)
        return self._take_decisions(now)

    def start_failed(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance failed to start. Its remains must still be removed."""
        if (instance := self._state.in_state(name, InstanceState.STARTING)) is not None:
            pool = instance.pool
            scope = self._provisioner.failed(instance, error, now)
            if scope is not FailureScope.NOBODY and pool.unmet_demand() > 0:
                for waiter in (
                    pool.waiters_of_next_start() if scope is FailureScope.NEXT_SERVED else pool.unserved_waiters()
                ):
                    self._fail(waiter, partial(decisions.start_failed_error, instance, error, now), now)
            self._serve_pool(pool, now)
            self._provisioner.start_all_possible(now)
        return self._take_decisions(now)

    def reset_done(self, name: str, now: float) -> list[Decision]:
        """An instance is clean and healthy again."""
        if (instance := self._state.in_state(name, InstanceState.RESETTING)) is not None:
            instance.checked = now
            self._became_idle(instance, now)
        return self._take_decisions(now)

    def reset_failed(self, name: str, now: float) -> list[Decision]:
        """An instance could not be reset, or is not healthy."""
        if (instance := self._state.in_state(name, InstanceState.RESETTING)) is not None:
            self._provisioner.stop(instance, now)
            self._serve_pool(instance.pool, now)
        return self._take_decisions(now)

    def died(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance was found broken while idle or leased, or before delivery.

        Requests that were granted it but have not received it return to their queue positions.
        """
        if (instance := self._state.in_state(name, InstanceState.IDLE, InstanceState.LEASED)) is not None:
            for held in list(instance.holdings.values()):
                if held.undelivered:
                    held.died_undelivered = True
                    self._state.end_hold(held)
                    for answered in held.undelivered:
                        self._state.requeue(answered, instance.pool)
                elif held.scope is Scope.ROLLOUT:
                    held.death_error = error
                else:
                    self._state.end_hold(held)
            instance.holdings.clear()
            self._provisioner.stop(instance, now)
            self._serve_pool(instance.pool, now)
        return self._take_decisions(now)

    def delivered(self, holding: Hold) -> None:
        """The first request of a hold has been answered."""
        holding.undelivered.clear()

    def stopped(self, name: str, now: float) -> list[Decision]:
        """An instance is gone."""
        if (instance := self._state.in_state(name, InstanceState.STOPPING, InstanceState.STUCK)) is not None:
            self._provisioner.removed(instance, now)
            self._serve_pool(instance.pool, now)
            self._provisioner.start_all_possible(now)
        return self._take_decisions(now)

    def stuck(self, name: str, now: float) -> list[Decision]:
        """An instance could not be stopped. It counts until it is `stopped`."""
        if (instance := self._state.in_state(name, InstanceState.STOPPING)) is not None:
            self._provisioner.stuck(instance, now)
            self._provisioner.start_all_possible(now)
        return self._take_decisions(now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def next_tick(self) -> float | None:
        """The time of the next `tick`; None if none is due."""
        return self._state.timers.next()

    def tick(self, now: float) -> list[Decision]:
        """Handle everything that is due at ``now``."""
        for what in self._state.timers.due(now):
            if isinstance(what, AcquireRequest):
                self._expire(what, now)
            elif isinstance(what, Instance):
                self._provisioner.timer_due(what, now)
                self._serve_pool(what.pool, now)
            elif isinstance(what, InstancePool):
                self._state.stop_prewarming_if_idle(what, now)
                self._provisioner.end_backoff(what, now)
                self._serve_pool(what, now)
            else:
                self._check_deadlocks(now)
        return self._take_decisions(now)

    def closed(self, now: float) -> list[Decision]:
        """The engine closes: reject all requests and stop all instances."""
        self._provisioner.closed = True
        for siblings in list(self._state.waiters.values()):
            self._state.fail(siblings[0], partial(decisions.engine_closed, siblings[0].owner, _label(siblings)))
        for held in list(self._state.holdings.values()):
            self._state.end_hold(held)
        for instance in self._state.instances.values():
            if instance.state not in (InstanceState.STOPPING, InstanceState.STUCK):
                self._provisioner.stop(instance, now)
        return self._take_decisions(now)

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[InstancePool]:
        """Every pool that has an instance, a waiter or a warm count; read only."""
        return list(self._state.pools.values())

    @property
    def owners(self) -> dict[str, Owner]:
        """All owners that hold or wait; read only."""
        return self._state.owners

    @property
    def budget_usage(self) -> BudgetUsage:
        """The used part of the budget; read only."""
        return self._provisioner.budget_usage

    @property
    def starting(self) -> int:
        """The number of starting instances."""
        return self._provisioner.starting

    # --- internals ----------------------------------------------------------------------------------------------------

    def _handle_request(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> None:
        """Serve a request by existing holds or an equal waiting request; queue it for the rest."""
        state, key = self._state, (request.owner, request.scope)
        holdings = [holding for pool in pools if (holding := pool.holds_by_owner.get(key)) is not None]
        if (dead := next((holding for holding in holdings if holding.death_error is not None), None)) is not None:
            state.reject(request.id, decisions.instance_died(dead))
            return
        for holding in holdings:
            state.grant_existing(holding, request.id)
        rest = [pool for pool in pools if key not in pool.holds_by_owner] if holdings else pools
        if rest and (siblings := state.find_same_request(request, rest)) is not None:
            state.join(siblings, request)
            state.set_deadline(request)
        elif rest:
            self._enqueue(request, rest, now)

    def _enqueue(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> None:
        """Queue a request, and serve it at once if possible."""
        siblings = self._state.enqueue(request, pools, now)
        for pool in pools:
            self._serve_pool(pool, now)
        self._state.set_deadline(request)
        if request.owner in self._state.holding_and_waiting:
            for waiter in list(siblings):
                self._provisioner.start_missing(waiter.pool, now)
            self._provisioner.serve_start_queues(now)
            for waiter in list(siblings):
                self._break_deadlock(waiter, now)

    def _serve_pool(self, pool: InstancePool, now: float) -> None:
        """Grant available instances, and start missing ones."""
        while (turn := pool.next_grant()) is not None:
            self._grant(*turn, now)
        while pool.queue.exclusive and pool.unmet_demand() > 0 and (spare := pool.unused_replica()) is not None:
            self._provisioner.reset(spare, now)
        self._provisioner.demand_changed(pool, now)
        self._state.forget_if_empty(pool)

    def _serve_all(self, waiters: Iterable[Waiter], now: float) -> None:
        """Serve the pools of these waiters."""
        for pool in {waiter.pool: None for waiter in waiters}:
            self._serve_pool(pool, now)

    def _grant(self, waiter: Waiter, instance: Instance, now: float) -> None:
        """Grant a waiter an instance, and its siblings their reserved instances."""
        grants = [(one, instance if one is waiter else one.pool.last_idle()) for one in waiter.siblings]
        relieved = self._state.grant(grants, now)
        for one, taken in grants:
            self._provisioner.assigned(taken, now)
            if one.scope is Scope.GLOBAL:
                one.pool.share(taken)
        for other in self.owners[waiter.owner].waiters.values():  # the owner is a holder now, and holders start first
            self._provisioner.start_missing(other.pool, now)
        # Reservations for other requests of the owner that this grant has served are free again too.
        self._serve_all([one for one, _ in grants if one is not waiter] + relieved, now)

    def _fail(self, waiter: Waiter, error: Callable[[], AgentFlyError], now: float) -> None:
        """Fail a waiter with its siblings, and serve the next waiters of their pools."""
        self._state.fail(waiter, error)
        self._serve_all((one for one in waiter.siblings if one is not waiter), now)

    def _release(self, holding: Hold, now: float) -> None:
        """End a hold, and serve the pool if its instance still exists."""
        instance, pool = holding.instance, holding.instance.pool
        if self._state.end_hold(holding):
            if instance.shared:
                pool.update_replica_room(instance)
            if not instance.holdings:
                self._last_owner_left(instance, now)
            self._serve_pool(pool, now)
        self._state.forget_if_empty(pool)

    def _last_owner_left(self, instance: Instance, now: float) -> None:
        """Stop, reset or idle an instance after its last owner has left."""
        if self._provisioner.should_stop(instance, now):
            self._provisioner.stop(instance, now)
        elif instance.shared:
            self._became_idle(instance, now)
        else:
            self._provisioner.reset(instance, now)

    def _became_idle(self, instance: Instance, now: float) -> None:
        """An instance has become idle: serve its pool."""
        self._provisioner.became_idle(instance, now)
        self._serve_pool(instance.pool, now)

    def _expire(self, request: AcquireRequest, now: float) -> None:
        """Reject a request whose deadline has passed."""
        if (siblings := self._state.waiters.get(request.id)) is None:
            return
        lacking = [waiter for waiter in siblings if not waiter.reserved]
        before = [self._wait_graph.holds_blocking(waiter) for waiter in lacking]
        error = decisions.acquire_timed_out(lacking, before, now)
        self._state.withdraw(request)
        self._state.reject(request.id, error)
        self._serve_all(siblings, now)

    def _check_deadlocks(self, now: float) -> None:
        """Check all waiters that could be deadlocked."""
        self._check_scheduled = False
        waiting = [waiter for owner in self._state.holding_and_waiting.values() for waiter in owner.waiters.values()]
        reserved = [
            waiter for siblings in self._state.multi_requests.values() for waiter in siblings if waiter.reserved
        ]
        for waiter in waiting + reserved:
            self._break_deadlock(waiter, now)

    def _break_deadlock(self, waiter: Waiter, now: float) -> None:
        """If a waiter is deadlocked, resolve the deadlock.

        Reserved instances in the deadlock go to the other waiters. If that does not help, the waiting request of the
        youngest holder fails.
        """
        deadlock = self._find_deadlock(waiter)
        if deadlock and self._yield_reservations(deadlock, now):
            deadlock = self._find_deadlock(waiter)
        if (victim := youngest_holder(deadlock, self.owners)) is None:
            return
        for loser in [candidate for candidate in deadlock if candidate.owner == victim]:
            self._state.fail(loser, partial(deadlock_error, victim, deadlock, now))
            self._serve_all(loser.siblings, now)

    def _find_deadlock(self, waiter: Waiter) -> DeadlockSet:
        return find_deadlock(waiter, self.owners, self._wait_graph.blockers_of) if waiter.is_waiting else {}

    def _yield_reservations(self, deadlock: DeadlockSet, now: float) -> bool:
        """Have deadlocked waiters give up their reservations in favour of the first waiter. False if none can.

        The first waiter is the first holder, or else the earliest. If the deadlock has a holder, whose request could
        fail instead, no waiter yields twice.
        """
        first = min(deadlock, key=lambda waiter: (waiter.owner not in self._state.holding_and_waiting, waiter.order))
        held = youngest_holder(deadlock, self.owners) is not None
        yielding = [
            one for one in reserved_waiters(deadlock) if one not in first.siblings and not (held and one.has_yielded)
        ]
        if not yielding:
            return False
        others = [
            one for siblings in self._state.multi_requests.values() for one in siblings if one not in first.siblings
        ]
        for waiter in others:
            waiter.yielding = True
        for waiter in yielding:
            waiter.has_yielded = True
        self._serve_all(yielding, now)
        for waiter in first.siblings:
            self._provisioner.start_missing(waiter.pool, now)
        for waiter in others:
            waiter.yielding = False
        self._serve_all(others, now)
        return True

    def _take_decisions(self, now: float) -> list[Decision]:
        """Return the decisions of an event."""
        if (self._state.holding_and_waiting or self._state.multi_requests) and not self._check_scheduled:
            self._check_scheduled = True
            self._state.timers.set(now + DEADLOCK_CHECK_INTERVAL_S, _DEADLOCK_CHECK)
        taken, self._state.decisions = self._state.decisions, []
        return taken


def _label(waiters: list[Waiter]) -> str:
    return " and ".join(waiter.pool.spec.label for waiter in waiters)

"""The scheduler: a pure state machine that decides who gets which instance, and what starts, resets and stops.

Its public methods are events: each says what happened at a time ``now`` and returns what is to be done about it. There
is no I/O here, no clock and no concurrency, so that long random histories can be driven through it.

How an instance lives::

    Start ── started ──→ idle ── Grant ──→ leased ── released ──→ Reset ── reset_done ──→ idle
      └ start_failed       └ no longer      └ died                  └ reset_failed
                             wanted
      └───────────────────┴────────────────┴───────────────────────┴──→ Stop ── stopped ──→ gone

What is decided, and why:

* Inside a pool the first of the highest priority is served first. A newcomer never overtakes.
* Who asks for several is given all at once, when there is one of each, and holds nothing of them before. What comes
  free in its turn is kept for it meanwhile. Sets stand in one order in all queues, so none waits for a later one.
* Instances start for those who wait, as many as have nothing coming, within the pool's capacity, the budget and the
  limit on concurrent starts. Across pools, owners who already hold something start first wherever it fits, because
  only they can be in each other's way. After them comes the pool whose first waiter came first, and none passes it.
* When the budget is short, idle instances make room, the longest idle first. A pool that is never idle gives an
  instance up to a request elsewhere that is older than its own and has waited for `supply.PATIENCE_S`.
* Starts that fail back off (`backoff`): those who wait go on waiting through what may pass, and nobody is failed for
  less than some seconds of it. Only what is bound to fail again fails those whom the instance would have served at
  once, unless others are coming for them.
* An instance that its rollout lost by death is not replaced behind that rollout's back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentfly.core.errors import AgentFlyError
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler import decisions as refusals
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
"""Seconds between two searches for deadlocks that came about otherwise than by a request."""

_SWEEP = object()


class Scheduler:
    """Decides for all pools of one engine.

    Args:
        budget: what all instances together may take.
        max_concurrent_starts: how many instances may be starting at once.
        weighed: whether a start counts for as many as its spec's ``start_places``, in place of one.
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
        self._books = SchedulerState()
        self._supply = Provisioner(self._books, budget or Budget(), max_concurrent_starts, weighed, name)
        self._obstacles = WaitGraph(self._books, self._supply)
        self._sweeping = False

    # --- what requests do ---------------------------------------------------------------------------------------------

    def requested(self, request: AcquireRequest, now: float) -> list[Decision]:
        """Somebody asks for an instance, or for one each of several specs."""
        books, pools = self._books, [self._books.pool(spec) for spec in request.specs]
        if self._supply.closed:
            books.reject(request.id, refusals.engine_closed(request.owner, request.label))
        elif (excess := self._supply.excess(pools)) is not None:
            books.reject(request.id, refusals.exceeds_budget(request, excess))
        else:
            for pool in pools:
                books.note_demand(pool, now)
            self._handle_request(request, pools, now)
        for pool in pools:
            books.forget_if_empty(pool)
        return self._take_decisions(now)

    def prefetched(self, spec: ResourceSpec[Any], now: float) -> list[Decision]:
        """Somebody is going to ask soon: what the spec keeps ready starts, where there is room."""
        if not self._supply.closed:
            pool = self._books.pool(spec)
            self._books.note_demand(pool, now)
            self._serve_pool(pool, now)
        return self._take_decisions(now)

    def cancelled(self, request: int, now: float) -> list[Decision]:
        """Whoever made a request no longer waits for the answer. Nothing happens if it has been answered."""
        if (partners := self._books.waiters.get(request)) is not None:
            self._books.withdraw(partners[0].requests[request])
            self._serve_all(partners, now)
        return self._take_decisions(now)

    def declined(self, holding: int, now: float) -> list[Decision]:
        """A request was granted a holding, but nobody was there to take it."""
        if (held := self._books.holdings.get(holding)) is not None:
            held.request_count -= 1
            if held.request_count == 0:
                self._release(held, now)
        return self._take_decisions(now)

    def released(self, holding: int, now: float) -> list[Decision]:
        """An owner gives a holding back. Nothing happens if it is over."""
        if (held := self._books.holdings.get(holding)) is not None:
            self._release(held, now)
        return self._take_decisions(now)

    def owner_released(self, name: str, now: float) -> list[Decision]:
        """An owner gives everything back and waits for nothing any more."""
        if (owner := self._books.owners.get(name)) is not None:
            waiters = list(owner.waiters.values())
            for waiter in waiters:
                self._books.fail(waiter, partial(refusals.owner_ended, name, _label(waiter.siblings)))
            for held in list(owner.holdings.values()):
                self._release(held, now)
            self._serve_all(waiters, now)
        return self._take_decisions(now)

    # --- what instances do --------------------------------------------------------------------------------------------

    def started(self, name: str, now: float) -> list[Decision]:
        """An instance came up."""
        if (instance := self._books.in_state(name, InstanceState.STARTING)) is not None:
            self._supply.started(instance, now)
            self._became_idle(instance, now)
            self._supply.start_all_possible(now)
        return self._take_decisions(now)

    def start_failed(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance did not come up. What there is of it is yet to be removed."""
        if (instance := self._books.in_state(name, InstanceState.STARTING)) is not None:
            pool = instance.pool
            loss = self._supply.failed(instance, error, now)
            if loss is not FailureScope.NOBODY and pool.unmet_demand() > 0:
                for waiter in (
                    pool.waiters_of_next_start() if loss is FailureScope.NEXT_SERVED else pool.unserved_waiters()
                ):
                    self._fail(waiter, partial(refusals.start_failed_error, instance, error, now), now)
            self._serve_pool(pool, now)
            self._supply.start_all_possible(now)
        return self._take_decisions(now)

    def reset_done(self, name: str, now: float) -> list[Decision]:
        """An instance is clean and healthy again."""
        if (instance := self._books.in_state(name, InstanceState.RESETTING)) is not None:
            instance.checked = now
            self._became_idle(instance, now)
        return self._take_decisions(now)

    def reset_failed(self, name: str, now: float) -> list[Decision]:
        """An instance could not be cleaned, or is not healthy."""
        if (instance := self._books.in_state(name, InstanceState.RESETTING)) is not None:
            self._supply.stop(instance, now)
            self._serve_pool(instance.pool, now)
        return self._take_decisions(now)

    def died(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance was found to be broken while idle or leased, or when it was to be handed out.

        Those who were granted it and have not got it go on waiting where they stood, for another one.
        """
        if (instance := self._books.in_state(name, InstanceState.IDLE, InstanceState.LEASED)) is not None:
            for held in list(instance.holdings.values()):
                if held.undelivered:
                    held.died_undelivered = True
                    self._books.end_hold(held)
                    for answered in held.undelivered:
                        self._books.requeue(answered, instance.pool)
                elif held.scope is Scope.ROLLOUT:
                    held.death_error = error
                else:
                    self._books.end_hold(held)
            instance.holdings.clear()
            self._supply.stop(instance, now)
            self._serve_pool(instance.pool, now)
        return self._take_decisions(now)

    def delivered(self, holding: Hold) -> None:
        """The first of those who were granted a holding has got it."""
        holding.undelivered.clear()

    def stopped(self, name: str, now: float) -> list[Decision]:
        """An instance is gone."""
        if (instance := self._books.in_state(name, InstanceState.STOPPING, InstanceState.STUCK)) is not None:
            self._supply.removed(instance, now)
            self._serve_pool(instance.pool, now)
            self._supply.start_all_possible(now)
        return self._take_decisions(now)

    def stuck(self, name: str, now: float) -> list[Decision]:
        """An instance was told to go and did not. It keeps counting until it is `stopped`."""
        if (instance := self._books.in_state(name, InstanceState.STOPPING)) is not None:
            self._supply.stuck(instance, now)
            self._supply.start_all_possible(now)
        return self._take_decisions(now)

    # --- what time does -----------------------------------------------------------------------------------------------

    def next_tick(self) -> float | None:
        """When `tick` is due next."""
        return self._books.timers.next()

    def tick(self, now: float) -> list[Decision]:
        """Time went by."""
        for what in self._books.timers.due(now):
            if isinstance(what, AcquireRequest):
                self._expire(what, now)
            elif isinstance(what, Instance):
                self._supply.timer_due(what, now)
                self._serve_pool(what.pool, now)
            elif isinstance(what, InstancePool):
                self._books.stop_prewarming_if_idle(what, now)
                self._supply.end_backoff(what, now)
                self._serve_pool(what, now)
            else:
                self._check_deadlocks(now)
        return self._take_decisions(now)

    def closed(self, now: float) -> list[Decision]:
        """The engine closes: nobody gets anything any more, and everything is to be removed."""
        self._supply.closed = True
        for partners in list(self._books.waiters.values()):
            self._books.fail(partners[0], partial(refusals.engine_closed, partners[0].owner, _label(partners)))
        for held in list(self._books.holdings.values()):
            self._books.end_hold(held)
        for instance in self._books.instances.values():
            if instance.state not in (InstanceState.STOPPING, InstanceState.STUCK):
                self._supply.stop(instance, now)
        return self._take_decisions(now)

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[InstancePool]:
        """Every pool that has an instance, a waiter or a warm count; to be read only."""
        return list(self._books.pools.values())

    @property
    def owners(self) -> dict[str, Owner]:
        """Everybody who holds or waits; to be read only."""
        return self._books.owners

    @property
    def budget_usage(self) -> BudgetUsage:
        """What is spent of the budget; to be read only."""
        return self._supply.account

    @property
    def starting(self) -> int:
        """How many instances are starting."""
        return self._supply.starting

    # --- what it comes to ---------------------------------------------------------------------------------------------

    def _handle_request(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> None:
        """Give a request what its owner has or is about to get, or else a place in the queues of the rest."""
        books, key = self._books, (request.owner, request.scope)
        holdings = [holding for pool in pools if (holding := pool.holds_by_owner.get(key)) is not None]
        if (dead := next((holding for holding in holdings if holding.death_error is not None), None)) is not None:
            books.reject(request.id, refusals.instance_died(dead))
            return
        for holding in holdings:
            books.grant_existing(holding, request.id)
        rest = [pool for pool in pools if key not in pool.holds_by_owner] if holdings else pools
        if rest and (partners := books.find_same_request(request, rest)) is not None:
            books.join(partners, request)
            books.set_deadline(request)
        elif rest:
            self._enqueue(request, rest, now)

    def _enqueue(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> None:
        """Have a request wait for its turn, which may be now."""
        partners = self._books.enqueue(request, pools, now)
        for pool in pools:
            self._serve_pool(pool, now)
        self._books.set_deadline(request)
        if request.owner in self._books.holding_and_waiting:
            for waiter in list(partners):
                self._supply.start_missing(waiter.pool, now)
            self._supply.serve_start_queues(now)
            for waiter in list(partners):
                self._break_deadlock(waiter, now)

    def _serve_pool(self, pool: InstancePool, now: float) -> None:
        """Give out what there is, and see that what is missing starts."""
        while (turn := pool.next_grant()) is not None:
            self._grant(*turn, now)
        while pool.queue.exclusive and pool.unmet_demand() > 0 and (spare := pool.unused_replica()) is not None:
            self._supply.reset(spare, now)
        self._supply.demand_changed(pool, now)
        self._books.forget_if_empty(pool)

    def _serve_all(self, waiters: Iterable[Waiter], now: float) -> None:
        """Something has changed for those who wait where some waiters wait or have waited."""
        for pool in {waiter.pool: None for waiter in waiters}:
            self._serve_pool(pool, now)

    def _grant(self, waiter: Waiter, instance: Instance, now: float) -> None:
        """It is somebody's turn: give it an instance, and its partners what is kept for them."""
        seats = [(one, instance if one is waiter else one.pool.last_idle()) for one in waiter.siblings]
        spared = self._books.grant(seats, now)
        for one, taken in seats:
            self._supply.assigned(taken, now)
            if one.scope is Scope.GLOBAL:
                one.pool.share(taken)
        for other in self.owners[waiter.owner].waiters.values():  # it is a holder now, and those start first
            self._supply.start_missing(other.pool, now)
        # What was kept in its partners' pools for another request of the owner, which this one has spared, is free too.
        self._serve_all([one for one, _ in seats if one is not waiter] + spared, now)

    def _fail(self, waiter: Waiter, error: Callable[[], AgentFlyError], now: float) -> None:
        """Fail a waiter, and with it its partners, whose places in their queues go to the next."""
        self._books.fail(waiter, error)
        self._serve_all((one for one in waiter.siblings if one is not waiter), now)

    def _release(self, holding: Hold, now: float) -> None:
        """A holding is over, and its place on the instance is free, unless the instance is gone already."""
        instance, pool = holding.instance, holding.instance.pool
        if self._books.end_hold(holding):
            if instance.shared:
                pool.update_replica_room(instance)
            if not instance.holdings:
                self._last_owner_left(instance, now)
            self._serve_pool(pool, now)
        self._books.forget_if_empty(pool)

    def _last_owner_left(self, instance: Instance, now: float) -> None:
        """The last owner of an instance has left."""
        if self._supply.should_stop(instance, now):
            self._supply.stop(instance, now)
        elif instance.shared:
            self._became_idle(instance, now)
        else:
            self._supply.reset(instance, now)

    def _became_idle(self, instance: Instance, now: float) -> None:
        """An instance has nobody: somebody may take it, in its own pool or in place of it."""
        self._supply.became_idle(instance, now)
        self._serve_pool(instance.pool, now)

    def _expire(self, request: AcquireRequest, now: float) -> None:
        """A request has waited as long as it may."""
        if (partners := self._books.waiters.get(request.id)) is None:
            return
        lacking = [waiter for waiter in partners if not waiter.reserved]
        before = [self._obstacles.holds_blocking(waiter) for waiter in lacking]
        error = refusals.acquire_timed_out(lacking, before, now)
        self._books.withdraw(request)
        self._books.reject(request.id, error)
        self._serve_all(partners, now)

    def _check_deadlocks(self, now: float) -> None:
        """Look for deadlocks among all who could be in one."""
        self._sweeping = False
        waiting = [waiter for owner in self._books.holding_and_waiting.values() for waiter in owner.waiters.values()]
        keeping = [waiter for partners in self._books.multi_requests.values() for waiter in partners if waiter.reserved]
        for waiter in waiting + keeping:
            self._break_deadlock(waiter, now)

    def _break_deadlock(self, waiter: Waiter, now: float) -> None:
        """If a waiter waits in vain, make room for those who block each other.

        What is kept for somebody among them goes to the others; if that is no help, the wait of the youngest holder is
        failed.
        """
        knot = self._find_deadlock(waiter)
        if knot and self._yield_reservations(knot, now):
            knot = self._find_deadlock(waiter)
        if (victim := youngest_holder(knot, self.owners)) is None:
            return
        for loser in [candidate for candidate in knot if candidate.owner == victim]:
            self._books.fail(loser, partial(deadlock_error, victim, knot, now))
            self._serve_all(loser.siblings, now)

    def _find_deadlock(self, waiter: Waiter) -> DeadlockSet:
        return find_deadlock(waiter, self.owners, self._obstacles.blockers_of) if waiter.is_waiting else {}

    def _yield_reservations(self, knot: DeadlockSet, now: float) -> bool:
        """Have those in a knot for whom something is kept let go of it, for the first of all in it.

        The first is who holds something, or else who came first. Where somebody holds something, whose wait could be
        failed instead, nobody lets go twice. False if nobody does.
        """
        first = min(knot, key=lambda waiter: (waiter.owner not in self._books.holding_and_waiting, waiter.order))
        held = youngest_holder(knot, self.owners) is not None
        letting_go = [
            one for one in reserved_waiters(knot) if one not in first.siblings and not (held and one.has_yielded)
        ]
        if not letting_go:
            return False
        others = [
            one for partners in self._books.multi_requests.values() for one in partners if one not in first.siblings
        ]
        for waiter in others:
            waiter.yielding = True
        for waiter in letting_go:
            waiter.has_yielded = True
        self._serve_all(letting_go, now)
        for waiter in first.siblings:
            self._supply.start_missing(waiter.pool, now)
        for waiter in others:
            waiter.yielding = False
        self._serve_all(others, now)
        return True

    def _take_decisions(self, now: float) -> list[Decision]:
        """What an event has come to."""
        if (self._books.holding_and_waiting or self._books.multi_requests) and not self._sweeping:
            self._sweeping = True
            self._books.timers.set(now + DEADLOCK_CHECK_INTERVAL_S, _SWEEP)
        decisions, self._books.decisions = self._books.decisions, []
        return decisions


def _label(waiters: list[Waiter]) -> str:
    return " and ".join(waiter.pool.spec.label for waiter in waiters)

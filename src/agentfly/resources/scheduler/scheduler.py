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

from agentfly.errors import AgentFlyError
from agentfly.resources.scheduler import refusals
from agentfly.resources.scheduler.backoff import Loss
from agentfly.resources.scheduler.books import Books
from agentfly.resources.scheduler.budget import Account, Budget
from agentfly.resources.scheduler.deadlock import Knot, broken, find_knot, keepers, youngest
from agentfly.resources.scheduler.decisions import Decision
from agentfly.resources.scheduler.obstacles import Obstacles
from agentfly.resources.scheduler.pool import Holding, Instance, InstanceState, Owner, Pool, Request, Waiter
from agentfly.resources.scheduler.supply import Supply
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec

SWEEP_S = 1.0
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
        self._books = Books()
        self._supply = Supply(self._books, budget or Budget(), max_concurrent_starts, weighed, name)
        self._obstacles = Obstacles(self._books, self._supply)
        self._sweeping = False

    # --- what requests do ---------------------------------------------------------------------------------------------

    def requested(self, request: Request, now: float) -> list[Decision]:
        """Somebody asks for an instance, or for one each of several specs."""
        books, pools = self._books, [self._books.pool(spec) for spec in request.specs]
        if self._supply.closed:
            books.refuse(request.id, refusals.closed(request.owner, request.label))
        elif (excess := self._supply.excess(pools)) is not None:
            books.refuse(request.id, refusals.too_large(request, excess))
        else:
            for pool in pools:
                books.ask(pool, now)
            self._answer(request, pools, now)
        for pool in pools:
            books.forget_if_empty(pool)
        return self._done(now)

    def expected(self, spec: ResourceSpec[Any], now: float) -> list[Decision]:
        """Somebody is going to ask soon: what the spec keeps ready starts, where there is room."""
        if not self._supply.closed:
            pool = self._books.pool(spec)
            self._books.ask(pool, now)
            self._serve(pool, now)
        return self._done(now)

    def cancelled(self, request: int, now: float) -> list[Decision]:
        """Whoever made a request no longer waits for the answer. Nothing happens if it has been answered."""
        if (partners := self._books.waiters.get(request)) is not None:
            self._books.withdraw(partners[0].requests[request])
            self._serve_all(partners, now)
        return self._done(now)

    def declined(self, holding: int, now: float) -> list[Decision]:
        """A request was granted a holding, but nobody was there to take it."""
        if (held := self._books.holdings.get(holding)) is not None:
            held.claims -= 1
            if held.claims == 0:
                self._release(held, now)
        return self._done(now)

    def released(self, holding: int, now: float) -> list[Decision]:
        """An owner gives a holding back. Nothing happens if it is over."""
        if (held := self._books.holdings.get(holding)) is not None:
            self._release(held, now)
        return self._done(now)

    def owner_released(self, name: str, now: float) -> list[Decision]:
        """An owner gives everything back and waits for nothing any more."""
        if (owner := self._books.owners.get(name)) is not None:
            waiters = list(owner.waiters.values())
            for waiter in waiters:
                self._books.fail(waiter, partial(refusals.owner_ended, name, _label(waiter.partners)))
            for held in list(owner.holdings.values()):
                self._release(held, now)
            self._serve_all(waiters, now)
        return self._done(now)

    # --- what instances do --------------------------------------------------------------------------------------------

    def started(self, name: str, now: float) -> list[Decision]:
        """An instance came up."""
        if (instance := self._books.in_state(name, InstanceState.STARTING)) is not None:
            self._supply.started(instance, now)
            self._rest(instance, now)
            self._supply.start_what_fits(now)
        return self._done(now)

    def start_failed(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance did not come up. What there is of it is yet to be removed."""
        if (instance := self._books.in_state(name, InstanceState.STARTING)) is not None:
            pool = instance.pool
            loss = self._supply.failed(instance, error, now)
            if loss is not Loss.NOBODY and pool.unmet() > 0:
                for waiter in pool.next_served() if loss is Loss.NEXT else pool.unprovided():
                    self._fail(waiter, partial(refusals.not_started, instance, error, now), now)
            self._serve(pool, now)
            self._supply.start_what_fits(now)
        return self._done(now)

    def reset_done(self, name: str, now: float) -> list[Decision]:
        """An instance is clean and healthy again."""
        if (instance := self._books.in_state(name, InstanceState.RESETTING)) is not None:
            instance.checked = now
            self._rest(instance, now)
        return self._done(now)

    def reset_failed(self, name: str, now: float) -> list[Decision]:
        """An instance could not be cleaned, or is not healthy."""
        if (instance := self._books.in_state(name, InstanceState.RESETTING)) is not None:
            self._supply.stop(instance, now)
            self._serve(instance.pool, now)
        return self._done(now)

    def died(self, name: str, error: BaseException, now: float) -> list[Decision]:
        """An instance was found to be broken while idle or leased, or when it was to be handed out.

        Those who were granted it and have not got it go on waiting where they stood, for another one.
        """
        if (instance := self._books.in_state(name, InstanceState.IDLE, InstanceState.LEASED)) is not None:
            for held in list(instance.holdings.values()):
                if held.answered:
                    held.void = True
                    self._books.end(held)
                    for answered in held.answered:
                        self._books.queue_again(answered, instance.pool)
                elif held.scope is Scope.ROLLOUT:
                    held.death = error
                else:
                    self._books.end(held)
            instance.holdings.clear()
            self._supply.stop(instance, now)
            self._serve(instance.pool, now)
        return self._done(now)

    def handed_out(self, holding: Holding) -> None:
        """The first of those who were granted a holding has got it."""
        holding.answered.clear()

    def stopped(self, name: str, now: float) -> list[Decision]:
        """An instance is gone."""
        if (instance := self._books.in_state(name, InstanceState.STOPPING, InstanceState.STUCK)) is not None:
            self._supply.gone(instance, now)
            self._serve(instance.pool, now)
            self._supply.start_what_fits(now)
        return self._done(now)

    def stuck(self, name: str, now: float) -> list[Decision]:
        """An instance was told to go and did not. It keeps counting until it is `stopped`."""
        if (instance := self._books.in_state(name, InstanceState.STOPPING)) is not None:
            self._supply.stuck(instance, now)
            self._supply.start_what_fits(now)
        return self._done(now)

    # --- what time does -----------------------------------------------------------------------------------------------

    def next_tick(self) -> float | None:
        """When `tick` is due next."""
        return self._books.timers.next()

    def tick(self, now: float) -> list[Decision]:
        """Time went by."""
        for what in self._books.timers.due(now):
            if isinstance(what, Request):
                self._expire(what, now)
            elif isinstance(what, Instance):
                self._supply.look_after(what, now)
                self._serve(what.pool, now)
            elif isinstance(what, Pool):
                self._books.lapse(what, now)
                self._supply.resume(what, now)
                self._serve(what, now)
            else:
                self._sweep(now)
        return self._done(now)

    def closed(self, now: float) -> list[Decision]:
        """The engine closes: nobody gets anything any more, and everything is to be removed."""
        self._supply.closed = True
        for partners in list(self._books.waiters.values()):
            self._books.fail(partners[0], partial(refusals.closed, partners[0].owner, _label(partners)))
        for held in list(self._books.holdings.values()):
            self._books.end(held)
        for instance in self._books.instances.values():
            if instance.state not in (InstanceState.STOPPING, InstanceState.STUCK):
                self._supply.stop(instance, now)
        return self._done(now)

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[Pool]:
        """Every pool that has an instance, a waiter or a warm count; to be read only."""
        return list(self._books.pools.values())

    @property
    def owners(self) -> dict[str, Owner]:
        """Everybody who holds or waits; to be read only."""
        return self._books.owners

    @property
    def account(self) -> Account:
        """What is spent of the budget; to be read only."""
        return self._supply.account

    @property
    def starting(self) -> int:
        """How many instances are starting."""
        return self._supply.starting

    # --- what it comes to ---------------------------------------------------------------------------------------------

    def _answer(self, request: Request, pools: list[Pool], now: float) -> None:
        """Give a request what its owner has or is about to get, or else a place in the queues of the rest."""
        books, key = self._books, (request.owner, request.scope)
        holdings = [holding for pool in pools if (holding := pool.held.get(key)) is not None]
        if (dead := next((holding for holding in holdings if holding.death is not None), None)) is not None:
            books.refuse(request.id, refusals.died(dead))
            return
        for holding in holdings:
            books.claim(holding, request.id)
        rest = [pool for pool in pools if key not in pool.held] if holdings else pools
        if rest and (partners := books.alike(request, rest)) is not None:
            books.join(partners, request)
            books.set_deadline(request)
        elif rest:
            self._queue(request, rest, now)

    def _queue(self, request: Request, pools: list[Pool], now: float) -> None:
        """Have a request wait for its turn, which may be now."""
        partners = self._books.queue(request, pools, now)
        for pool in pools:
            self._serve(pool, now)
        self._books.set_deadline(request)
        if request.owner in self._books.entangled:
            for waiter in list(partners):
                self._supply.start_missing(waiter.pool, now)
            self._supply.advance(now)
            for waiter in list(partners):
                self._break_deadlock(waiter, now)

    def _serve(self, pool: Pool, now: float) -> None:
        """Give out what there is, and see that what is missing starts."""
        while (turn := pool.turn()) is not None:
            self._give(*turn, now)
        while pool.queue.exclusive and pool.unmet() > 0 and (spare := pool.unused_shared()) is not None:
            self._supply.reset(spare, now)
        self._supply.demand(pool, now)
        self._books.forget_if_empty(pool)

    def _serve_all(self, waiters: Iterable[Waiter], now: float) -> None:
        """Something has changed for those who wait where some waiters wait or have waited."""
        for pool in {waiter.pool: None for waiter in waiters}:
            self._serve(pool, now)

    def _give(self, waiter: Waiter, instance: Instance, now: float) -> None:
        """It is somebody's turn: give it an instance, and its partners what is kept for them."""
        seats = [(one, instance if one is waiter else one.pool.last_idle()) for one in waiter.partners]
        spared = self._books.grant(seats, now)
        for one, taken in seats:
            self._supply.take(taken, now)
            if one.scope is Scope.GLOBAL:
                one.pool.share(taken)
        for other in self.owners[waiter.owner].waiters.values():  # it is a holder now, and those start first
            self._supply.start_missing(other.pool, now)
        # What was kept in its partners' pools for another request of the owner, which this one has spared, is free too.
        self._serve_all([one for one, _ in seats if one is not waiter] + spared, now)

    def _fail(self, waiter: Waiter, error: Callable[[], AgentFlyError], now: float) -> None:
        """Fail a waiter, and with it its partners, whose places in their queues go to the next."""
        self._books.fail(waiter, error)
        self._serve_all((one for one in waiter.partners if one is not waiter), now)

    def _release(self, holding: Holding, now: float) -> None:
        """A holding is over, and its place on the instance is free, unless the instance is gone already."""
        instance, pool = holding.instance, holding.instance.pool
        if self._books.end(holding):
            if instance.shared:
                pool.update_seats(instance)
            if not instance.holdings:
                self._vacate(instance, now)
            self._serve(pool, now)
        self._books.forget_if_empty(pool)

    def _vacate(self, instance: Instance, now: float) -> None:
        """The last owner of an instance has left."""
        if self._supply.is_spent(instance, now):
            self._supply.stop(instance, now)
        elif instance.shared:
            self._rest(instance, now)
        else:
            self._supply.reset(instance, now)

    def _rest(self, instance: Instance, now: float) -> None:
        """An instance has nobody: somebody may take it, in its own pool or in place of it."""
        self._supply.rest(instance, now)
        self._serve(instance.pool, now)

    def _expire(self, request: Request, now: float) -> None:
        """A request has waited as long as it may."""
        if (partners := self._books.waiters.get(request.id)) is None:
            return
        lacking = [waiter for waiter in partners if not waiter.kept]
        before = [self._obstacles.holdings_before(waiter) for waiter in lacking]
        error = refusals.timed_out(lacking, before, now)
        self._books.withdraw(request)
        self._books.refuse(request.id, error)
        self._serve_all(partners, now)

    def _sweep(self, now: float) -> None:
        """Look for deadlocks among all who could be in one."""
        self._sweeping = False
        waiting = [waiter for owner in self._books.entangled.values() for waiter in owner.waiters.values()]
        keeping = [waiter for partners in self._books.sets.values() for waiter in partners if waiter.kept]
        for waiter in waiting + keeping:
            self._break_deadlock(waiter, now)

    def _break_deadlock(self, waiter: Waiter, now: float) -> None:
        """If a waiter waits in vain, make room for those who block each other.

        What is kept for somebody among them goes to the others; if that is no help, the wait of the youngest holder is
        failed.
        """
        knot = self._knot(waiter)
        if knot and self._step_aside(knot, now):
            knot = self._knot(waiter)
        if (victim := youngest(knot, self.owners)) is None:
            return
        for loser in [candidate for candidate in knot if candidate.owner == victim]:
            self._books.fail(loser, partial(broken, victim, knot, now))
            self._serve_all(loser.partners, now)

    def _knot(self, waiter: Waiter) -> Knot:
        return find_knot(waiter, self.owners, self._obstacles.in_the_way) if waiter.waits else {}

    def _step_aside(self, knot: Knot, now: float) -> bool:
        """Have those in a knot for whom something is kept let go of it, for the first of all in it.

        The first is who holds something, or else who came first. Where somebody holds something, whose wait could be
        failed instead, nobody lets go twice. False if nobody does.
        """
        first = min(knot, key=lambda waiter: (waiter.owner not in self._books.entangled, waiter.order))
        held = youngest(knot, self.owners) is not None
        letting_go = [one for one in keepers(knot) if one not in first.partners and not (held and one.let_go)]
        if not letting_go:
            return False
        others = [one for partners in self._books.sets.values() for one in partners if one not in first.partners]
        for waiter in others:
            waiter.aside = True
        for waiter in letting_go:
            waiter.let_go = True
        self._serve_all(letting_go, now)
        for waiter in first.partners:
            self._supply.start_missing(waiter.pool, now)
        for waiter in others:
            waiter.aside = False
        self._serve_all(others, now)
        return True

    def _done(self, now: float) -> list[Decision]:
        """What an event has come to."""
        if (self._books.entangled or self._books.sets) and not self._sweeping:
            self._sweeping = True
            self._books.timers.set(now + SWEEP_S, _SWEEP)
        decisions, self._books.decisions = self._books.decisions, []
        return decisions


def _label(waiters: list[Waiter]) -> str:
    return " and ".join(waiter.pool.spec.label for waiter in waiters)

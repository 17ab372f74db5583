"""Books: who waits for what, who holds what, and what the scheduler has decided so far.

They are kept consistent here and read everywhere in the scheduler; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from agentfly.errors import AgentFlyError
from agentfly.resources.scheduler.decisions import Decision, End, Fail, Grant
from agentfly.resources.scheduler.pool import Answered, Holding, Instance, InstanceState, Owner, Pool, Request, Waiter
from agentfly.resources.scheduler.timers import Timers
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec


class Books:
    """The scheduler's records, with one way to change each."""

    def __init__(self) -> None:
        self.pools: dict[ResourceSpec[Any], Pool] = {}
        self.attended: dict[Pool, None] = {}  # those that start instances ahead of who asks
        self.instances: dict[str, Instance] = {}
        self.owners: dict[str, Owner] = {}  # those who hold or wait
        self.entangled: dict[str, Owner] = {}  # those who hold and wait: only they can be in a deadlock
        self.holdings: dict[int, Holding] = {}
        self.waiters: dict[int, list[Waiter]] = {}  # by request; partners of each other
        self.sets: dict[int, list[Waiter]] = {}  # partners that are more than one, by their arrival
        self.timers = Timers()
        self.numbers = count(1)
        self.decisions: list[Decision] = []

    def pool(self, spec: ResourceSpec[Any]) -> Pool:
        """The pool of a spec."""
        pool = self.pools.get(spec)
        if pool is None:
            pool = self.pools[spec] = Pool(spec)
        return pool

    def ask(self, pool: Pool, now: float) -> None:
        """Somebody wants something of a pool, which then keeps as much ready as its spec says."""
        pool.asked = now
        if (pool.spec.warm or pool.spec.replicas > 1) and not pool.attended:
            pool.attended, pool.warm = True, pool.spec.warm
            self.attended[pool] = None
            self._await_lapse(pool)

    def lapse(self, pool: Pool, now: float) -> None:
        """If nobody has asked for a pool during its idle time, it keeps nothing ready any more."""
        limit = pool.spec.idle_timeout_s
        if not pool.attended or limit is None or now < pool.lapses:
            return
        if now < pool.asked + limit:
            self._await_lapse(pool)
        else:
            pool.attended, pool.warm = False, 0
            del self.attended[pool]

    def forget_if_empty(self, pool: Pool) -> None:
        """Drop a pool that nothing is left of."""
        if pool.is_empty() and self.pools.get(pool.spec) is pool:
            del self.pools[pool.spec]

    def in_state(self, name: str, *states: InstanceState) -> Instance | None:
        """An instance, if there is one of that name in one of these states."""
        instance = self.instances.get(name)
        return instance if instance is not None and instance.state in states else None

    def queue(self, request: Request, pools: list[Pool], now: float) -> list[Waiter]:
        """Put a request at the end of the queue of each pool that it needs something of."""
        partners: list[Waiter] = []
        place = Answered((request,), request.priority, next(self.numbers), now)
        for pool in pools:
            pool.queue.lane(request.scope).add(self._place(place, pool, {request.id: request}, partners))
        return partners

    def queue_again(self, answered: Answered, pool: Pool) -> None:
        """Put requests that were granted something of a pool back where they stood, if they still want it."""
        requests = {request.id: request for request in answered.requests if not request.over}
        if not requests:
            return
        partners = self.waiters.get(next(iter(requests)), [])
        waiter = self._place(answered, pool, requests, partners)
        pool.queue.lane(waiter.scope).restore(waiter)
        for request in waiter.requests.values():
            if request.timer is None:
                self.set_deadline(request)

    def _place(self, place: Answered, pool: Pool, requests: dict[int, Request], partners: list[Waiter]) -> Waiter:
        """Note that requests wait for something of a pool, with partners that wait elsewhere."""
        first = place.requests[0]
        waiter = Waiter(
            number=next(self.numbers),
            owner=first.owner,
            scope=first.scope,
            priority=place.priority,
            arrival=place.arrival,
            since=place.since,
            pool=pool,
            requests=partners[0].requests if partners else requests,
            partners=partners,
        )
        partners.append(waiter)
        if first.scope is not Scope.CALL:
            pool.waiting.setdefault((first.owner, first.scope), []).append(waiter)
        owner = self.owners.setdefault(first.owner, Owner(first.owner))
        owner.waiters[waiter.number] = waiter
        for request in waiter.requests:
            self.waiters[request] = partners
        if len(partners) > 1:
            self.sets[place.arrival] = partners
        self._note(owner)
        return waiter

    def alike(self, request: Request, pools: list[Pool]) -> list[Waiter] | None:
        """The places of an earlier request of the same owner that waits for the same."""
        for waiter in pools[0].waiting.get((request.owner, request.scope), ()):
            if {partner.pool for partner in waiter.partners} == set(pools):
                return waiter.partners
        return None

    def join(self, partners: list[Waiter], request: Request) -> None:
        """Have a request wait together with others of its owner for the same thing."""
        self.waiters[request.id] = partners
        partners[0].requests[request.id] = request

    def set_deadline(self, request: Request) -> None:
        """Have a request that waits come due when it may wait no longer."""
        if request.deadline is not None and request.id in self.waiters:
            request.timer = self.timers.set(request.deadline, request)

    def withdraw(self, request: Request) -> None:
        """A request waits no longer, for nothing; the last one takes its places in the queues along."""
        request.over = True
        self._withdraw(request)

    def _withdraw(self, request: Request) -> None:
        partners = self._forget(request)
        requests = partners[0].requests
        del requests[request.id]
        if not requests:
            self.sets.pop(partners[0].arrival, None)
            for waiter in partners:
                self._leave(waiter)

    def refuse(self, request: int, error: AgentFlyError) -> None:
        """Answer a request, which does not wait, with an error."""
        self.decisions.append(Fail(request, error))

    def fail(self, waiter: Waiter, error: Callable[[], AgentFlyError]) -> None:
        """Answer all requests of a waiter, if it still waits, with an error each."""
        for request in list(waiter.requests.values()) if waiter.waits else ():
            self.withdraw(request)
            self.refuse(request.id, error())

    def grant(self, seats: list[tuple[Waiter, Instance]], now: float) -> list[Waiter]:
        """Answer all requests of a waiter and its partners with a holding of an instance each.

        Returns:
            the places elsewhere of other sets that the owner waits for, which need an instance less now.
        """
        first = seats[0][0]
        requests = list(first.requests.values())
        for request in requests:
            self._withdraw(request)
        owner = self.owners.setdefault(first.owner, Owner(first.owner))
        spared: list[Waiter] = []
        for waiter, instance in seats:
            holding = self._hold(waiter, instance, requests, now)
            holding.answered.append(_answered(waiter, requests))
            owner.holdings[holding.id] = holding
            for other in list(waiter.pool.waiting.get((waiter.owner, waiter.scope), ())):
                spared += self._spare(other, holding)
        self._note(owner)
        return spared

    def _hold(self, waiter: Waiter, instance: Instance, requests: list[Request], now: float) -> Holding:
        holding = Holding(
            id=next(self.numbers),
            owner=waiter.owner,
            scope=waiter.scope,
            instance=instance,
            since=now,
            caller=next(iter(requests[0].callers), None),
            claims=len(requests),
        )
        instance.holdings[holding.id] = holding
        self.holdings[holding.id] = holding
        if waiter.scope is not Scope.CALL:
            waiter.pool.held[waiter.owner, waiter.scope] = holding
        self.decisions += [Grant(request.id, holding) for request in requests]
        return holding

    def _spare(self, waiter: Waiter, holding: Holding) -> list[Waiter]:
        """The owner of a waiter has got what it waits for by another request. Returns the partners that are left."""
        holding.answered.append(_answered(waiter, waiter.requests.values()))
        for request in waiter.requests.values():
            self.claim(holding, request.id)
        self._leave(waiter)
        waiter.partners.remove(waiter)
        if len(waiter.partners) < 2:
            self.sets.pop(waiter.arrival, None)
        if not waiter.partners:
            for request in waiter.requests.values():
                self._forget(request)
        return waiter.partners

    def _forget(self, request: Request) -> list[Waiter]:
        if request.timer is not None:
            self.timers.drop(request.timer)
            request.timer = None
        return self.waiters.pop(request.id)

    def _leave(self, waiter: Waiter) -> None:
        """Take a waiter out of its pool's queue."""
        pool, key = waiter.pool, (waiter.owner, waiter.scope)
        pool.queue.lane(waiter.scope).remove(waiter)
        if pool.kept.pop(waiter.number, None) is not None:
            waiter.kept = False
        if (here := pool.waiting.get(key)) is not None:
            here.remove(waiter)
            if not here:
                del pool.waiting[key]
        owner = self.owners[waiter.owner]
        del owner.waiters[waiter.number]
        self._note(owner)

    def claim(self, holding: Holding, request: int) -> None:
        """Answer a request with what its owner holds already."""
        holding.claims += 1
        self.decisions.append(Grant(request, holding))

    def end(self, holding: Holding) -> bool:
        """A holding is over. Says whether its instance was still there for it."""
        del self.holdings[holding.id]
        holding.instance.pool.held.pop((holding.owner, holding.scope), None)
        owner = self.owners[holding.owner]
        del owner.holdings[holding.id]
        self._note(owner)
        self.decisions.append(End(holding))
        return holding.instance.holdings.pop(holding.id, None) is not None

    def _await_lapse(self, pool: Pool) -> None:
        if pool.spec.idle_timeout_s is not None:
            pool.lapses = pool.asked + pool.spec.idle_timeout_s
            self.timers.set(pool.lapses, pool)

    def _note(self, owner: Owner) -> None:
        """Keep the lists of owners right after what one holds or waits for has changed."""
        if owner.holdings and owner.waiters:
            self.entangled[owner.name] = owner
        else:
            self.entangled.pop(owner.name, None)
            if not owner.holdings and not owner.waiters:
                del self.owners[owner.name]


def _answered(waiter: Waiter, requests: Iterable[Request]) -> Answered:
    return Answered(tuple(requests), waiter.priority, waiter.arrival, waiter.since)

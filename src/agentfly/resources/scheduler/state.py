"""SchedulerState: waiters, holds, instances, timers and pending decisions.

Its methods keep these records consistent. Every part of the scheduler reads them; no decision is made here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from agentfly.core.errors import AgentFlyError
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler.decisions import Decision, EndHold, GrantRequest, RejectRequest
from agentfly.resources.scheduler.pool import (
    AcquireRequest,
    Hold,
    Instance,
    InstancePool,
    InstanceState,
    Owner,
    ServedRequests,
    Waiter,
)
from agentfly.resources.spec import ResourceSpec


class TimerQueue:
    """What is due when. Setting, dropping and asking cost no more than a logarithm of how many there are."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [when, order, what]; what is None once dropped
        self._order = count()
        self._dropped = 0

    def set(self, when: float, what: Any) -> list[Any]:
        """Have ``what`` come due at ``when``. Returns a token for `drop`."""
        token = [when, next(self._order), what]
        heapq.heappush(self._heap, token)
        return token

    def cancel(self, token: list[Any]) -> None:
        """Forget what has not come due yet; nothing happens if it has."""
        if token[2] is None:
            return
        token[2] = None
        self._dropped += 1
        if self._dropped > 100 and 2 * self._dropped > len(self._heap):
            self._heap = [kept for kept in self._heap if kept[2] is not None]
            heapq.heapify(self._heap)
            self._dropped = 0

    def next(self) -> float | None:
        """When something is due next."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
            self._dropped -= 1
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Any]:
        """What has come due, in order; it is due once."""
        found = []
        while (when := self.next()) is not None and when <= now:
            token = heapq.heappop(self._heap)
            found.append(token[2])
            token[2] = None
        return found


class SchedulerState:
    """The scheduler's records, with one way to change each."""

    def __init__(self) -> None:
        self.pools: dict[ResourceSpec[Any], InstancePool] = {}
        self.prewarmed_pools: dict[InstancePool, None] = {}  # those that start instances ahead of who asks
        self.instances: dict[str, Instance] = {}
        self.owners: dict[str, Owner] = {}  # those who hold or wait
        self.holding_and_waiting: dict[str, Owner] = {}  # those who hold and wait: only they can be in a deadlock
        self.holdings: dict[int, Hold] = {}
        self.waiters: dict[int, list[Waiter]] = {}  # by request; partners of each other
        self.multi_requests: dict[int, list[Waiter]] = {}  # partners that are more than one, by their arrival
        self.timers = TimerQueue()
        self.ids = count(1)
        self.decisions: list[Decision] = []

    def pool(self, spec: ResourceSpec[Any]) -> InstancePool:
        """The pool of a spec."""
        pool = self.pools.get(spec)
        if pool is None:
            pool = self.pools[spec] = InstancePool(spec)
        return pool

    def note_demand(self, pool: InstancePool, now: float) -> None:
        """Somebody wants something of a pool, which then keeps as much ready as its spec says."""
        pool.last_demand = now
        if (pool.spec.warm or pool.spec.replicas > 1) and not pool.is_prewarmed:
            pool.is_prewarmed, pool.warm = True, pool.spec.warm
            self.prewarmed_pools[pool] = None
            self._await_lapse(pool)

    def stop_prewarming_if_idle(self, pool: InstancePool, now: float) -> None:
        """If nobody has asked for a pool during its idle time, it keeps nothing ready any more."""
        limit = pool.spec.idle_timeout_s
        if not pool.is_prewarmed or limit is None or now < pool.prewarm_check_at:
            return
        if now < pool.last_demand + limit:
            self._await_lapse(pool)
        else:
            pool.is_prewarmed, pool.warm = False, 0
            del self.prewarmed_pools[pool]

    def forget_if_empty(self, pool: InstancePool) -> None:
        """Drop a pool that nothing is left of."""
        if pool.is_empty() and self.pools.get(pool.spec) is pool:
            del self.pools[pool.spec]

    def in_state(self, name: str, *states: InstanceState) -> Instance | None:
        """An instance, if there is one of that name in one of these states."""
        instance = self.instances.get(name)
        return instance if instance is not None and instance.state in states else None

    def enqueue(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> list[Waiter]:
        """Put a request at the end of the queue of each pool that it needs something of."""
        partners: list[Waiter] = []
        place = ServedRequests((request,), request.priority, next(self.ids), now)
        for pool in pools:
            pool.queue.lane(request.scope).add(self._add_waiter(place, pool, {request.id: request}, partners))
        return partners

    def requeue(self, answered: ServedRequests, pool: InstancePool) -> None:
        """Put requests that were granted something of a pool back where they stood, if they still want it."""
        requests = {request.id: request for request in answered.requests if not request.closed}
        if not requests:
            return
        partners = self.waiters.get(next(iter(requests)), [])
        waiter = self._add_waiter(answered, pool, requests, partners)
        pool.queue.lane(waiter.scope).reinsert(waiter)
        for request in waiter.requests.values():
            if request.timer is None:
                self.set_deadline(request)

    def _add_waiter(
        self, place: ServedRequests, pool: InstancePool, requests: dict[int, AcquireRequest], partners: list[Waiter]
    ) -> Waiter:
        """Note that requests wait for something of a pool, with partners that wait elsewhere."""
        first = place.requests[0]
        waiter = Waiter(
            number=next(self.ids),
            owner=first.owner,
            scope=first.scope,
            priority=place.priority,
            arrival=place.arrival,
            since=place.since,
            pool=pool,
            requests=partners[0].requests if partners else requests,
            siblings=partners,
        )
        partners.append(waiter)
        if first.scope is not Scope.CALL:
            pool.waiters_by_owner.setdefault((first.owner, first.scope), []).append(waiter)
        owner = self.owners.setdefault(first.owner, Owner(first.owner))
        owner.waiters[waiter.number] = waiter
        for request in waiter.requests:
            self.waiters[request] = partners
        if len(partners) > 1:
            self.multi_requests[place.arrival] = partners
        self._update_owner(owner)
        return waiter

    def find_same_request(self, request: AcquireRequest, pools: list[InstancePool]) -> list[Waiter] | None:
        """The places of an earlier request of the same owner that waits for the same."""
        for waiter in pools[0].waiters_by_owner.get((request.owner, request.scope), ()):
            if {partner.pool for partner in waiter.siblings} == set(pools):
                return waiter.siblings
        return None

    def join(self, partners: list[Waiter], request: AcquireRequest) -> None:
        """Have a request wait together with others of its owner for the same thing."""
        self.waiters[request.id] = partners
        partners[0].requests[request.id] = request

    def set_deadline(self, request: AcquireRequest) -> None:
        """Have a request that waits come due when it may wait no longer."""
        if request.deadline is not None and request.id in self.waiters:
            request.timer = self.timers.set(request.deadline, request)

    def withdraw(self, request: AcquireRequest) -> None:
        """A request waits no longer, for nothing; the last one takes its places in the queues along."""
        request.closed = True
        self._withdraw(request)

    def _withdraw(self, request: AcquireRequest) -> None:
        partners = self._forget(request)
        requests = partners[0].requests
        del requests[request.id]
        if not requests:
            self.multi_requests.pop(partners[0].arrival, None)
            for waiter in partners:
                self._remove_waiter(waiter)

    def reject(self, request: int, error: AgentFlyError) -> None:
        """Answer a request, which does not wait, with an error."""
        self.decisions.append(RejectRequest(request, error))

    def fail(self, waiter: Waiter, error: Callable[[], AgentFlyError]) -> None:
        """Answer all requests of a waiter, if it still waits, with an error each."""
        for request in list(waiter.requests.values()) if waiter.is_waiting else ():
            self.withdraw(request)
            self.reject(request.id, error())

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
            holding.undelivered.append(_answered(waiter, requests))
            owner.holdings[holding.id] = holding
            for other in list(waiter.pool.waiters_by_owner.get((waiter.owner, waiter.scope), ())):
                spared += self._serve_other_waiter(other, holding)
        self._update_owner(owner)
        return spared

    def _hold(self, waiter: Waiter, instance: Instance, requests: list[AcquireRequest], now: float) -> Hold:
        holding = Hold(
            id=next(self.ids),
            owner=waiter.owner,
            scope=waiter.scope,
            instance=instance,
            since=now,
            caller=next(iter(requests[0].callers), None),
            request_count=len(requests),
        )
        instance.holdings[holding.id] = holding
        self.holdings[holding.id] = holding
        if waiter.scope is not Scope.CALL:
            waiter.pool.holds_by_owner[waiter.owner, waiter.scope] = holding
        self.decisions += [GrantRequest(request.id, holding) for request in requests]
        return holding

    def _serve_other_waiter(self, waiter: Waiter, holding: Hold) -> list[Waiter]:
        """The owner of a waiter has got what it waits for by another request. Returns the partners that are left."""
        holding.undelivered.append(_answered(waiter, waiter.requests.values()))
        for request in waiter.requests.values():
            self.grant_existing(holding, request.id)
        self._remove_waiter(waiter)
        waiter.siblings.remove(waiter)
        if len(waiter.siblings) < 2:
            self.multi_requests.pop(waiter.arrival, None)
        if not waiter.siblings:
            for request in waiter.requests.values():
                self._forget(request)
        return waiter.siblings

    def _forget(self, request: AcquireRequest) -> list[Waiter]:
        if request.timer is not None:
            self.timers.cancel(request.timer)
            request.timer = None
        return self.waiters.pop(request.id)

    def _remove_waiter(self, waiter: Waiter) -> None:
        """Take a waiter out of its pool's queue."""
        pool, key = waiter.pool, (waiter.owner, waiter.scope)
        pool.queue.lane(waiter.scope).remove(waiter)
        if pool.reservations.pop(waiter.number, None) is not None:
            waiter.reserved = False
        if (here := pool.waiters_by_owner.get(key)) is not None:
            here.remove(waiter)
            if not here:
                del pool.waiters_by_owner[key]
        owner = self.owners[waiter.owner]
        del owner.waiters[waiter.number]
        self._update_owner(owner)

    def grant_existing(self, holding: Hold, request: int) -> None:
        """Answer a request with what its owner holds already."""
        holding.request_count += 1
        self.decisions.append(GrantRequest(request, holding))

    def end_hold(self, holding: Hold) -> bool:
        """A holding is over. Says whether its instance was still there for it."""
        del self.holdings[holding.id]
        holding.instance.pool.holds_by_owner.pop((holding.owner, holding.scope), None)
        owner = self.owners[holding.owner]
        del owner.holdings[holding.id]
        self._update_owner(owner)
        self.decisions.append(EndHold(holding))
        return holding.instance.holdings.pop(holding.id, None) is not None

    def _await_lapse(self, pool: InstancePool) -> None:
        if pool.spec.idle_timeout_s is not None:
            pool.prewarm_check_at = pool.last_demand + pool.spec.idle_timeout_s
            self.timers.set(pool.prewarm_check_at, pool)

    def _update_owner(self, owner: Owner) -> None:
        """Keep the lists of owners right after what one holds or waits for has changed."""
        if owner.holdings and owner.waiters:
            self.holding_and_waiting[owner.name] = owner
        else:
            self.holding_and_waiting.pop(owner.name, None)
            if not owner.holdings and not owner.waiters:
                del self.owners[owner.name]


def _answered(waiter: Waiter, requests: Iterable[AcquireRequest]) -> ServedRequests:
    return ServedRequests(tuple(requests), waiter.priority, waiter.arrival, waiter.since)

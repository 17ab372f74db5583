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
    """Timers by due time. Each operation takes logarithmic time."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [time, order, action]; the action is None once cancelled
        self._order = count()
        self._cancelled = 0

    def set(self, when: float, what: Any) -> list[Any]:
        """Set a timer for ``what`` at ``when``. Returns a token for `cancel`."""
        token = [when, next(self._order), what]
        heapq.heappush(self._heap, token)
        return token

    def cancel(self, token: list[Any]) -> None:
        """Cancel a timer. Does nothing if it was due already."""
        if token[2] is None:
            return
        token[2] = None
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._heap):
            self._heap = [token for token in self._heap if token[2] is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next(self) -> float | None:
        """The time of the next timer; None if there is none."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Any]:
        """Remove and return the due actions, in order."""
        found = []
        while (when := self.next()) is not None and when <= now:
            token = heapq.heappop(self._heap)
            found.append(token[2])
            token[2] = None
        return found


class SchedulerState:
    """The records of the scheduler, with one method for each change."""

    def __init__(self) -> None:
        self.pools: dict[ResourceSpec[Any], InstancePool] = {}
        self.prewarmed_pools: dict[InstancePool, None] = {}  # pools that start instances before they are requested
        self.instances: dict[str, Instance] = {}
        self.owners: dict[str, Owner] = {}  # owners that hold or wait
        self.holding_and_waiting: dict[str, Owner] = {}  # owners that hold and wait: only these can deadlock
        self.holdings: dict[int, Hold] = {}
        self.waiters: dict[int, list[Waiter]] = {}  # by request; siblings of each other
        self.multi_requests: dict[int, list[Waiter]] = {}  # waiters of requests for several specs, by arrival
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
        """Record a request for a pool, which then keeps its warm instances ready."""
        pool.last_demand = now
        if (pool.spec.warm or pool.spec.replicas > 1) and not pool.is_prewarmed:
            pool.is_prewarmed, pool.warm = True, pool.spec.warm
            self.prewarmed_pools[pool] = None
            self._schedule_prewarm_check(pool)

    def stop_prewarming_if_idle(self, pool: InstancePool, now: float) -> None:
        """Stop keeping instances ready if the pool had no request during its idle time."""
        limit = pool.spec.idle_timeout_s
        if not pool.is_prewarmed or limit is None or now < pool.prewarm_check_at:
            return
        if now < pool.last_demand + limit:
            self._schedule_prewarm_check(pool)
        else:
            pool.is_prewarmed, pool.warm = False, 0
            del self.prewarmed_pools[pool]

    def forget_if_empty(self, pool: InstancePool) -> None:
        """Delete a pool without any state."""
        if pool.is_empty() and self.pools.get(pool.spec) is pool:
            del self.pools[pool.spec]

    def in_state(self, name: str, *states: InstanceState) -> Instance | None:
        """The instance of that name, if it is in one of these states."""
        instance = self.instances.get(name)
        return instance if instance is not None and instance.state in states else None

    def enqueue(self, request: AcquireRequest, pools: list[InstancePool], now: float) -> list[Waiter]:
        """Add a request to the queue of each of its pools."""
        siblings: list[Waiter] = []
        position = ServedRequests((request,), request.priority, next(self.ids), now)
        for pool in pools:
            pool.queue.lane(request.scope).add(self._add_waiter(position, pool, {request.id: request}, siblings))
        return siblings

    def requeue(self, served: ServedRequests, pool: InstancePool) -> None:
        """Put served requests back at their former position in the queue, unless they are closed."""
        requests = {request.id: request for request in served.requests if not request.closed}
        if not requests:
            return
        siblings = self.waiters.get(next(iter(requests)), [])
        waiter = self._add_waiter(served, pool, requests, siblings)
        pool.queue.lane(waiter.scope).reinsert(waiter)
        for request in waiter.requests.values():
            if request.timer is None:
                self.set_deadline(request)

    def _add_waiter(
        self, position: ServedRequests, pool: InstancePool, requests: dict[int, AcquireRequest], siblings: list[Waiter]
    ) -> Waiter:
        """Add a waiter for requests; its siblings wait in other pools."""
        first = position.requests[0]
        waiter = Waiter(
            number=next(self.ids),
            owner=first.owner,
            scope=first.scope,
            priority=position.priority,
            arrival=position.arrival,
            since=position.since,
            pool=pool,
            requests=siblings[0].requests if siblings else requests,
            siblings=siblings,
        )
        siblings.append(waiter)
        if first.scope is not Scope.CALL:
            pool.waiters_by_owner.setdefault((first.owner, first.scope), []).append(waiter)
        owner = self.owners.setdefault(first.owner, Owner(first.owner))
        owner.waiters[waiter.number] = waiter
        for request in waiter.requests:
            self.waiters[request] = siblings
        if len(siblings) > 1:
            self.multi_requests[position.arrival] = siblings
        self._update_owner(owner)
        return waiter

    def find_same_request(self, request: AcquireRequest, pools: list[InstancePool]) -> list[Waiter] | None:
        """The waiters of an earlier request of the same owner and scope for the same pools."""
        for waiter in pools[0].waiters_by_owner.get((request.owner, request.scope), ()):
            if {sibling.pool for sibling in waiter.siblings} == set(pools):
                return waiter.siblings
        return None

    def join(self, siblings: list[Waiter], request: AcquireRequest) -> None:
        """Add a request to the waiters of an equal earlier request."""
        self.waiters[request.id] = siblings
        siblings[0].requests[request.id] = request

    def set_deadline(self, request: AcquireRequest) -> None:
        """Set the timer for the deadline of a waiting request."""
        if request.deadline is not None and request.id in self.waiters:
            request.timer = self.timers.set(request.deadline, request)

    def withdraw(self, request: AcquireRequest) -> None:
        """Withdraw a waiting request. Its waiters leave their queues with the last of their requests."""
        request.closed = True
        self._withdraw(request)

    def _withdraw(self, request: AcquireRequest) -> None:
        siblings = self._forget(request)
        requests = siblings[0].requests
        del requests[request.id]
        if not requests:
            self.multi_requests.pop(siblings[0].arrival, None)
            for waiter in siblings:
                self._remove_waiter(waiter)

    def reject(self, request: int, error: AgentFlyError) -> None:
        """Reject a request that has no waiter with an error."""
        self.decisions.append(RejectRequest(request, error))

    def fail(self, waiter: Waiter, error: Callable[[], AgentFlyError]) -> None:
        """Reject all requests of a waiter, if it is still queued, with an error each."""
        for request in list(waiter.requests.values()) if waiter.is_waiting else ():
            self.withdraw(request)
            self.reject(request.id, error())

    def grant(self, grants: list[tuple[Waiter, Instance]], now: float) -> list[Waiter]:
        """Grant all requests of a waiter and its siblings a hold on an instance each.

        Returns:
            remaining waiters of the owner's other requests, which need one instance less now.
        """
        first = grants[0][0]
        requests = list(first.requests.values())
        for request in requests:
            self._withdraw(request)
        owner = self.owners.setdefault(first.owner, Owner(first.owner))
        relieved: list[Waiter] = []
        for waiter, instance in grants:
            holding = self._hold(waiter, instance, requests, now)
            holding.undelivered.append(_served(waiter, requests))
            owner.holdings[holding.id] = holding
            for other in list(waiter.pool.waiters_by_owner.get((waiter.owner, waiter.scope), ())):
                relieved += self._serve_other_waiter(other, holding)
        self._update_owner(owner)
        return relieved

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
        """Serve a waiter by a hold that its owner got through another request. Returns its remaining siblings."""
        holding.undelivered.append(_served(waiter, waiter.requests.values()))
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
        """Remove a waiter from its pool's queue."""
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
        """Grant a request a hold that its owner already has."""
        holding.request_count += 1
        self.decisions.append(GrantRequest(request, holding))

    def end_hold(self, holding: Hold) -> bool:
        """End a hold. Returns whether its instance still had it."""
        del self.holdings[holding.id]
        holding.instance.pool.holds_by_owner.pop((holding.owner, holding.scope), None)
        owner = self.owners[holding.owner]
        del owner.holdings[holding.id]
        self._update_owner(owner)
        self.decisions.append(EndHold(holding))
        return holding.instance.holdings.pop(holding.id, None) is not None

    def _schedule_prewarm_check(self, pool: InstancePool) -> None:
        if pool.spec.idle_timeout_s is not None:
            pool.prewarm_check_at = pool.last_demand + pool.spec.idle_timeout_s
            self.timers.set(pool.prewarm_check_at, pool)

    def _update_owner(self, owner: Owner) -> None:
        """Update the index of owners after a change of one owner's holds or waiters."""
        if owner.holdings and owner.waiters:
            self.holding_and_waiting[owner.name] = owner
        else:
            self.holding_and_waiting.pop(owner.name, None)
            if not owner.holdings and not owner.waiters:
                del self.owners[owner.name]


def _served(waiter: Waiter, requests: Iterable[AcquireRequest]) -> ServedRequests:
    return ServedRequests(tuple(requests), waiter.priority, waiter.arrival, waiter.since)

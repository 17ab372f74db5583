"""Books: who waits for what, who holds what, and what the scheduler has decided so far.

They are kept consistent here and read everywhere in the scheduler; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from agentfly.errors import AgentFlyError
from agentfly.resources.decisions import Decision, End, Fail, Grant
from agentfly.resources.pool import Holding, Instance, InstanceState, Owner, Pool, Request, Waiter
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec
from agentfly.resources.timers import Timers


class Books:
    """The scheduler's records, with one way to change each."""

    def __init__(self) -> None:
        self.pools: dict[ResourceSpec[Any], Pool] = {}
        self.warm_pools: dict[Pool, None] = {}  # those that keep idle instances ready
        self.instances: dict[str, Instance] = {}
        self.owners: dict[str, Owner] = {}  # those who hold or wait
        self.entangled: dict[str, Owner] = {}  # those who hold and wait: only they can be in a deadlock
        self.holdings: dict[int, Holding] = {}
        self.waiters: dict[int, Waiter] = {}  # by request
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
        if pool.spec.warm and not pool.warm:
            pool.warm = pool.spec.warm
            self.warm_pools[pool] = None
            self._await_lapse(pool)

    def lapse(self, pool: Pool, now: float) -> None:
        """If nobody has asked for a pool during its idle time, it keeps nothing ready any more."""
        limit = pool.spec.idle_timeout_s
        if not pool.warm or limit is None or now < pool.lapses:
            return
        if now < pool.asked + limit:
            self._await_lapse(pool)
        else:
            pool.warm = 0
            del self.warm_pools[pool]

    def forget_if_empty(self, pool: Pool) -> None:
        """Drop a pool that nothing is left of."""
        if pool.is_empty() and self.pools.get(pool.spec) is pool:
            del self.pools[pool.spec]

    def in_state(self, name: str, *states: InstanceState) -> Instance | None:
        """An instance, if there is one of that name in one of these states."""
        instance = self.instances.get(name)
        return instance if instance is not None and instance.state in states else None

    def queue(self, request: Request, pool: Pool, now: float) -> Waiter:
        """Put a request at the end of a pool's queue."""
        owner = self.owners.setdefault(request.owner, Owner(request.owner))
        waiter = Waiter(
            number=next(self.numbers),
            owner=request.owner,
            scope=request.scope,
            priority=request.priority,
            since=now,
            pool=pool,
        )
        self.join(waiter, request)
        pool.queue.add(waiter)
        if request.scope is not Scope.CALL:
            pool.waiting[request.owner, request.scope] = waiter
        owner.waiters[waiter.number] = waiter
        self._note(owner)
        return waiter

    def join(self, waiter: Waiter, request: Request) -> None:
        """Have a request wait together with others of its owner for the same thing."""
        self.waiters[request.id] = waiter
        waiter.requests[request.id] = request

    def set_deadline(self, request: Request) -> None:
        """Have a request that waits come due when it may wait no longer."""
        if request.deadline is not None and (waiter := self.waiters.get(request.id)) is not None:
            waiter.timers[request.id] = self.timers.set(request.deadline, request)

    def withdraw(self, request: int) -> None:
        """A request waits no longer; the last one takes its place in the queue along."""
        waiter = self.waiters.pop(request)
        del waiter.requests[request]
        if (timer := waiter.timers.pop(request, None)) is not None:
            self.timers.drop(timer)
        if not waiter.requests:
            waiter.pool.queue.remove(waiter)
            waiter.pool.waiting.pop((waiter.owner, waiter.scope), None)
            owner = self.owners[waiter.owner]
            del owner.waiters[waiter.number]
            self._note(owner)

    def refuse(self, request: int, error: AgentFlyError) -> None:
        """Answer a request, which does not wait, with an error."""
        self.decisions.append(Fail(request, error))

    def fail(self, waiter: Waiter, error: Callable[[], AgentFlyError]) -> None:
        """Answer all requests of a waiter with an error each."""
        for request in list(waiter.requests):
            self.withdraw(request)
            self.refuse(request, error())

    def grant(self, waiter: Waiter, instance: Instance, now: float) -> Holding:
        """Answer all requests of a waiter with a holding of an instance."""
        pool, requests = waiter.pool, list(waiter.requests.values())
        for request in requests:
            self.withdraw(request.id)
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
            pool.held[waiter.owner, waiter.scope] = holding
        owner = self.owners.setdefault(waiter.owner, Owner(waiter.owner))
        owner.holdings[holding.id] = holding
        self._note(owner)
        self.decisions += [Grant(request.id, holding) for request in requests]
        return holding

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

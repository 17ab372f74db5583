"""Provisioner: decides which instances start and stop, within the budget and the limit on concurrent starts."""

from __future__ import annotations

import heapq
from itertools import count

from agentfly.resources.scheduler.backoff import FailureScope, StartFailureCause
from agentfly.resources.scheduler.budget import Budget, BudgetUsage, ResourceCost, total_cost
from agentfly.resources.scheduler.decisions import (
    BackOffStarts,
    CheckInstance,
    ResetInstance,
    StartInstance,
    StopInstance,
)
from agentfly.resources.scheduler.pool import TRANSITIONAL, Instance, InstancePool, InstanceState, Waiter
from agentfly.resources.scheduler.state import SchedulerState


class StartQueue:
    """Pools that want a start. A pool's place is that of the first in it whom nothing is coming for."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, InstancePool]] = []  # an entry whose pool has another key is void
        self._order = count()

    def push(self, pool: InstancePool) -> None:
        """Have a pool stand where the first in it who lacks an instance belongs."""
        first = pool.first_unserved()
        if first is not None and pool.start_queue_key != first.order:
            pool.start_queue_key = first.order
            heapq.heappush(self._heap, (first.order, next(self._order), pool))

    def discard(self, pool: InstancePool) -> None:
        """Take a pool out of the line."""
        pool.start_queue_key = None

    def peek(self) -> InstancePool | None:
        """Whose turn it is."""
        while self._heap:
            key, _, pool = self._heap[0]
            wants = pool.start_queue_key == key and pool.starts_wanted() > 0
            if wants and (first := pool.first_unserved()) is not None and first.order == key:
                return pool
            heapq.heappop(self._heap)
            if pool.start_queue_key == key:
                self.discard(pool)
            if wants:
                self.push(pool)
        return None


EVICTION_WAIT_S = 5.0
"""Seconds that a request waits for the budget before a busy pool gives up an instance for it."""


class Provisioner:
    """Brings instances through their lives for all pools."""

    def __init__(self, books: SchedulerState, budget: Budget, places: int, weighed: bool, name: str) -> None:
        """Begin with none; the arguments are those of `Scheduler`."""
        self.account = BudgetUsage(budget)
        self.starting = 0
        self.closed = False
        self._books = books
        self._max_start_weight = places
        self._start_weight = 0  # places, by those that are starting
        self._weighed = weighed
        self._name = name
        self._start_queues = {
            costly: StartQueue() for costly in (False, True)
        }  # want of budget holds up no one who needs none
        self._disk_full_pools: dict[InstancePool, None] = {}  # those whose starts wait for room on a disk
        self._evictable: dict[str, Instance] = {}  # idle and of use to the budget; the longest idle is the first

    # --- what starts --------------------------------------------------------------------------------------------------

    def demand_changed(self, pool: InstancePool, now: float) -> None:
        """A pool's waiters or instances have changed: see that what it is missing starts, in its turn."""
        if pool.queue and pool.starts_wanted() > 0:
            self._start_queues[pool.uses_budget].push(pool)
        self.serve_start_queues(now)
        if pool.is_prewarmed:
            self._start_ahead(now)

    def start_all_possible(self, now: float) -> None:
        """A place to start or a part of the budget has come free: start what was waiting for it."""
        entangled = self._books.holding_and_waiting.values()
        for pool in {waiter.pool: None for owner in entangled for waiter in owner.waiters.values()}:
            self.start_missing(pool, now)
        self.serve_start_queues(now)
        self._start_ahead(now)

    def start_missing(self, pool: InstancePool, now: float) -> None:
        """Start what those who wait in a pool are missing, as far as it goes."""
        while pool.starts_wanted() > 0 and self._start_next(pool, now):
            pass

    def _starts_are_full(self, pool: InstancePool) -> bool:
        """Whether as many instances are starting as may, next to which another of a pool would be too many."""
        return self._start_weight > 0 and self._start_weight + self._weight_of(pool) > self._max_start_weight

    def _weight_of(self, pool: InstancePool) -> int:
        return pool.start_weight if self._weighed else 1

    def serve_start_queues(self, now: float) -> None:
        """Serve the pools in line in their order, as far as it goes."""
        for line in self._start_queues.values():
            while (pool := line.peek()) is not None and self._start_next(pool, now):
                pass

    def _start_next(self, pool: InstancePool, now: float) -> bool:
        """Start one instance; False if that has to wait."""
        if self._starts_are_full(pool):
            return False
        if not self.account.fits(pool.cost):
            self._evict_idle(pool.cost, now)
            return False
        self._start(pool, now)
        return True

    def excess(self, pools: list[InstancePool]) -> str | None:
        """Why one instance of each of some pools can never be alive at once, in words; None if they can."""
        costly = [pool.cost for pool in pools if pool.uses_budget]
        if not costly:
            return None
        return self.account.describe_excess(costly[0] if len(costly) == 1 else total_cost(costly))

    def _start_ahead(self, now: float) -> None:
        """Start warm instances and replicas if nobody who waits could use what they would take."""
        if self.closed or self._start_queues[False].peek() is not None:
            return
        short = self._start_queues[True].peek() is not None
        for pool in (
            self._books.prewarmed_pools
            if not short
            else [one for one in self._books.prewarmed_pools if not one.uses_budget]
        ):
            while pool.prewarm_starts_wanted() > 0 and not self._starts_are_full(pool) and self.account.fits(pool.cost):
                self._start(pool, now)

    def _evict_idle(self, cost: ResourceCost, now: float) -> None:
        """Evict idle instances that are kept for nobody until there will be enough, as far as they help."""
        while any(short := self.account.shortage(cost)):
            helpful = (
                idle for idle in self._evictable.values() if idle.is_unreserved and _helps(short, idle.pool.cost)
            )
            if (instance := next(helpful, None)) is None:
                return
            self.stop(instance, now)

    def _start(self, pool: InstancePool, now: float) -> None:
        label = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in pool.spec.label.lower())
        name = f"{label[:24].strip('-')}-{self._name}-{next(self._books.ids)}"
        instance = Instance(name=name, pool=pool, state=InstanceState.STARTING, since=now, started=now)
        self._books.instances[name] = instance
        pool.set_state(instance, InstanceState.STARTING, now)
        self.starting += 1
        self._start_weight += self._weight_of(pool)
        self.account.spend(pool.cost)
        self._books.decisions.append(StartInstance(name, pool.spec))

    # --- what happens to an instance ----------------------------------------------------------------------------------

    def started(self, instance: Instance, now: float) -> None:
        """A start is over, well."""
        self._leave_place(instance)
        instance.pool.backoff.succeeded()
        self._disk_full_pools.pop(instance.pool, None)
        instance.has_started, instance.started, instance.checked = True, now, now
        self._set_timer(instance, now)

    def failed(self, instance: Instance, error: BaseException, now: float) -> FailureScope:
        """A start is over, badly. Says whom that fails."""
        pool, backoff = instance.pool, instance.pool.backoff
        self.stop(instance, now)
        rounds = backoff.rounds
        backoff.failed(instance.started, error, now)
        if backoff.cause is StartFailureCause.DISK_FULL:
            self._disk_full_pools[pool] = None
        if backoff.rounds > rounds:
            self._books.timers.set(backoff.until, pool)
            if backoff.blocks_waiters:
                seconds, full = backoff.until - now, backoff.cause is StartFailureCause.DISK_FULL
                self._books.decisions.append(BackOffStarts(pool.spec, error, seconds, backoff.rounds, full))
        return backoff.failure_scope(now, may_be_freed=any(one.has_started for one in self._books.instances.values()))

    def end_backoff(self, pool: InstancePool, now: float) -> None:
        """Time went by, in which the pause of a pool may have ended."""
        pool.backoff.resume(now)

    def _leave_place(self, instance: Instance) -> None:
        self.starting -= 1
        self._start_weight -= self._weight_of(instance.pool)

    def assigned(self, instance: Instance, now: float) -> None:
        """An instance gets an owner."""
        instance.uses += 1
        if instance.state is not InstanceState.LEASED:
            self._evictable.pop(instance.name, None)
            instance.pool.set_state(instance, InstanceState.LEASED, now)

    def became_idle(self, instance: Instance, now: float) -> None:
        """An instance has nobody: somebody may take it, in its own pool or in place of it."""
        instance.pool.set_state(instance, InstanceState.IDLE, now)
        if instance.pool.uses_budget:
            self._evictable[instance.name] = instance

    def reset(self, instance: Instance, now: float) -> None:
        """Have an instance cleaned."""
        self._evictable.pop(instance.name, None)
        instance.pool.set_state(instance, InstanceState.RESETTING, now)
        self._books.decisions.append(ResetInstance(instance.name, instance.pool.spec))

    def stop(self, instance: Instance, now: float) -> None:
        """Have an instance removed, whatever it is doing."""
        if instance.state is InstanceState.STARTING:
            self._leave_place(instance)
        self._evictable.pop(instance.name, None)
        if instance.timer is not None:
            self._books.timers.cancel(instance.timer)
        instance.pool.set_state(instance, InstanceState.STOPPING, now)
        self.account.mark_returning(instance.pool.cost)
        self._books.decisions.append(StopInstance(instance.name, instance.pool.spec))

    def stuck(self, instance: Instance, now: float) -> None:
        """An instance was told to go and did not."""
        self.account.unmark_returning(instance.pool.cost)
        instance.pool.set_state(instance, InstanceState.STUCK, now)

    def removed(self, instance: Instance, now: float) -> None:
        """An instance is no more."""
        if instance.state is InstanceState.STUCK:
            self.account.mark_returning(instance.pool.cost)
        self.account.returned(instance.pool.cost)
        instance.pool.remove(instance)
        del self._books.instances[instance.name]
        if instance.has_started:
            for pool in list(self._disk_full_pools):
                if self._books.pools.get(pool.spec) is not pool:  # forgotten
                    del self._disk_full_pools[pool]
                    continue
                pool.backoff.space_freed(now)
                self.demand_changed(pool, now)

    def should_stop(self, instance: Instance, now: float) -> bool:
        """Whether an instance that has just lost its last owner should go rather than stay."""
        pool = instance.pool
        if pool.has_reached_max_uses(instance) or (pool.spec.is_single_use and not instance.shared):
            return True
        hungry = self._start_queues[True].peek()
        if hungry is None or hungry is pool or not _helps(self.account.shortage(hungry.cost), pool.cost):
            return False
        own, other = pool.first_unserved(), hungry.first_unserved()
        assert other is not None  # a pool in the line lacks something
        return own is None or (other.order < own.order and now - other.since >= EVICTION_WAIT_S)

    def instances_using_shortage(self, pool: InstancePool) -> list[Instance]:
        """The instances that take what of the budget a pool's next start will be short of.

        None if there will be enough, once everything on its way out is gone.
        """
        if not any(short := self.account.shortage(pool.cost)):
            return []
        return [instance for instance in self._books.instances.values() if _helps(short, instance.pool.cost)]

    def ahead_in_start_queue(self, pool: InstancePool) -> Waiter | None:
        """Who has to get an instance started before a pool does, if the line is all that the pool waits for."""
        first = self._start_queues[pool.uses_budget].peek()
        return None if first is None or first is pool else first.first_unserved()

    # --- what time does to it -----------------------------------------------------------------------------------------

    def timer_due(self, instance: Instance, now: float) -> None:
        """An instance may have been idle for too long, or is to be checked."""
        spec, pool = instance.pool.spec, instance.pool
        if instance.state in (InstanceState.STOPPING, InstanceState.STUCK):
            return
        if (
            instance.state is InstanceState.IDLE
            and spec.idle_timeout_s is not None
            and now >= instance.since + spec.idle_timeout_s
            and (instance.shared or len(pool.idle) > pool.warm + len(pool.reservations))
        ):
            self.stop(instance, now)
            return
        if spec.check_interval_s is not None and now >= instance.checked + spec.check_interval_s:
            instance.checked = now
            if instance.state not in TRANSITIONAL:
                self._books.decisions.append(CheckInstance(instance.name, spec))
        self._set_timer(instance, now)

    def _set_timer(self, instance: Instance, now: float) -> None:
        """Have an instance looked after when something may be due; what it does meanwhile sets no timer."""
        spec, due = instance.pool.spec, []
        if spec.check_interval_s is not None:
            due.append(instance.checked + spec.check_interval_s)
        if spec.idle_timeout_s is not None:
            idle_since = instance.since if instance.state is InstanceState.IDLE else now
            ends = idle_since + spec.idle_timeout_s
            due.append(ends if ends > now else now + spec.idle_timeout_s)
        instance.timer = self._books.timers.set(min(due), instance) if due else None


def _helps(short: tuple[bool, ...], cost: ResourceCost) -> bool:
    return any(lacking and amount > 0 for lacking, amount in zip(short, cost, strict=True))

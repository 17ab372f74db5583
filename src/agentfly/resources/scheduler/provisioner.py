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
    """Pools that need another instance, ordered by their oldest unserved waiter.

    A waiter is unserved if no instance is ready or starting for it.
    """

    def __init__(self) -> None:
        self._heap: list[
            tuple[tuple[int, int], int, InstancePool]
        ] = []  # an entry is stale if its pool has another key
        self._order = count()

    def push(self, pool: InstancePool) -> None:
        """Add a pool, in the order of its first unserved waiter."""
        first = pool.first_unserved()
        if first is not None and pool.start_queue_key != first.order:
            pool.start_queue_key = first.order
            heapq.heappush(self._heap, (first.order, next(self._order), pool))

    def discard(self, pool: InstancePool) -> None:
        """Remove a pool from the queue."""
        pool.start_queue_key = None

    def peek(self) -> InstancePool | None:
        """The first pool of the queue; None if it is empty."""
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
"""Seconds that a request waits for the budget before a busy pool must give up an instance for it."""


class Provisioner:
    """Starts and stops the instances of all pools."""

    def __init__(self, state: SchedulerState, budget: Budget, max_start_weight: int, weighed: bool, name: str) -> None:
        """Create it without instances; the arguments are those of `Scheduler`."""
        self.budget_usage = BudgetUsage(budget)
        self.starting = 0
        self.closed = False
        self._state = state
        self._max_start_weight = max_start_weight
        self._start_weight = 0  # the total weight of starting instances
        self._weighed = weighed
        self._name = name
        self._start_queues = {
            costly: StartQueue() for costly in (False, True)
        }  # pools that wait for the budget must not delay pools that use none
        self._disk_full_pools: dict[InstancePool, None] = {}  # pools whose starts wait for disk space
        self._evictable: dict[str, Instance] = {}  # idle instances that use budget; the longest idle first

    # --- starts -------------------------------------------------------------------------------------------------------

    def demand_changed(self, pool: InstancePool, now: float) -> None:
        """Start missing instances, in order, after a pool's waiters or instances have changed."""
        if pool.queue and pool.starts_wanted() > 0:
            self._start_queues[pool.uses_budget].push(pool)
        self.serve_start_queues(now)
        if pool.is_prewarmed:
            self._start_ahead(now)

    def start_all_possible(self, now: float) -> None:
        """Start waiting instances after start capacity or budget has become free."""
        owners = self._state.holding_and_waiting.values()
        for pool in {waiter.pool: None for owner in owners for waiter in owner.waiters.values()}:
            self.start_missing(pool, now)
        self.serve_start_queues(now)
        self._start_ahead(now)

    def start_missing(self, pool: InstancePool, now: float) -> None:
        """Start the missing instances of a pool, as far as possible."""
        while pool.starts_wanted() > 0 and self._start_next(pool, now):
            pass

    def _starts_are_full(self, pool: InstancePool) -> bool:
        """Whether another start of a pool would exceed the limit on concurrent starts."""
        return self._start_weight > 0 and self._start_weight + self._weight_of(pool) > self._max_start_weight

    def _weight_of(self, pool: InstancePool) -> int:
        return pool.start_weight if self._weighed else 1

    def serve_start_queues(self, now: float) -> None:
        """Start instances for the queued pools, in order, as far as possible."""
        for queue in self._start_queues.values():
            while (pool := queue.peek()) is not None and self._start_next(pool, now):
                pass

    def _start_next(self, pool: InstancePool, now: float) -> bool:
        """Start one instance. Returns False if that must wait."""
        if self._starts_are_full(pool):
            return False
        if not self.budget_usage.fits(pool.cost):
            self._evict_idle(pool.cost, now)
            return False
        self._start(pool, now)
        return True

    def excess(self, pools: list[InstancePool]) -> str | None:
        """Why one instance of each of these pools can never exist at the same time; None if they can."""
        costly = [pool.cost for pool in pools if pool.uses_budget]
        if not costly:
            return None
        return self.budget_usage.describe_excess(costly[0] if len(costly) == 1 else total_cost(costly))

    def _start_ahead(self, now: float) -> None:
        """Start warm instances and replicas if no waiter could use the same capacity."""
        if self.closed or self._start_queues[False].peek() is not None:
            return
        short = self._start_queues[True].peek() is not None
        for pool in (
            self._state.prewarmed_pools
            if not short
            else [one for one in self._state.prewarmed_pools if not one.uses_budget]
        ):
            while (
                pool.prewarm_starts_wanted() > 0
                and not self._starts_are_full(pool)
                and self.budget_usage.fits(pool.cost)
            ):
                self._start(pool, now)

    def _evict_idle(self, cost: ResourceCost, now: float) -> None:
        """Evict unreserved idle instances that help, until the shortage is covered."""
        while any(short := self.budget_usage.shortage(cost)):
            helpful = (
                idle for idle in self._evictable.values() if idle.is_unreserved and _helps(short, idle.pool.cost)
            )
            if (instance := next(helpful, None)) is None:
                return
            self.stop(instance, now)

    def _start(self, pool: InstancePool, now: float) -> None:
        label = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in pool.spec.label.lower())
        name = f"{label[:24].strip('-')}-{self._name}-{next(self._state.ids)}"
        instance = Instance(name=name, pool=pool, state=InstanceState.STARTING, since=now, started=now)
        self._state.instances[name] = instance
        pool.set_state(instance, InstanceState.STARTING, now)
        self.starting += 1
        self._start_weight += self._weight_of(pool)
        self.budget_usage.spend(pool.cost)
        self._state.decisions.append(StartInstance(name, pool.spec))

    # --- instance events ----------------------------------------------------------------------------------------------

    def started(self, instance: Instance, now: float) -> None:
        """A start has succeeded."""
        self._start_ended(instance)
        instance.pool.backoff.succeeded()
        self._disk_full_pools.pop(instance.pool, None)
        instance.has_started, instance.started, instance.checked = True, now, now
        self._set_timer(instance, now)

    def failed(self, instance: Instance, error: BaseException, now: float) -> FailureScope:
        """A start has failed. Returns which requests fail with it."""
        pool, backoff = instance.pool, instance.pool.backoff
        self.stop(instance, now)
        rounds = backoff.rounds
        backoff.failed(instance.started, error, now)
        if backoff.cause is StartFailureCause.DISK_FULL:
            self._disk_full_pools[pool] = None
        if backoff.rounds > rounds:
            self._state.timers.set(backoff.until, pool)
            if backoff.blocks_waiters:
                seconds, full = backoff.until - now, backoff.cause is StartFailureCause.DISK_FULL
                self._state.decisions.append(BackOffStarts(pool.spec, error, seconds, backoff.rounds, full))
        return backoff.failure_scope(now, may_be_freed=any(one.has_started for one in self._state.instances.values()))

    def end_backoff(self, pool: InstancePool, now: float) -> None:
        """End the backoff of a pool if its time has passed."""
        pool.backoff.resume(now)

    def _start_ended(self, instance: Instance) -> None:
        self.starting -= 1
        self._start_weight -= self._weight_of(instance.pool)

    def assigned(self, instance: Instance, now: float) -> None:
        """Assign an instance to one more owner."""
        instance.uses += 1
        if instance.state is not InstanceState.LEASED:
            self._evictable.pop(instance.name, None)
            instance.pool.set_state(instance, InstanceState.LEASED, now)

    def became_idle(self, instance: Instance, now: float) -> None:
        """Note that an instance is idle: it may be granted, or evicted for another pool."""
        instance.pool.set_state(instance, InstanceState.IDLE, now)
        if instance.pool.uses_budget:
            self._evictable[instance.name] = instance

    def reset(self, instance: Instance, now: float) -> None:
        """Reset an instance."""
        self._evictable.pop(instance.name, None)
        instance.pool.set_state(instance, InstanceState.RESETTING, now)
        self._state.decisions.append(ResetInstance(instance.name, instance.pool.spec))

    def stop(self, instance: Instance, now: float) -> None:
        """Stop an instance in any state."""
        if instance.state is InstanceState.STARTING:
            self._start_ended(instance)
        self._evictable.pop(instance.name, None)
        if instance.timer is not None:
            self._state.timers.cancel(instance.timer)
        instance.pool.set_state(instance, InstanceState.STOPPING, now)
        self.budget_usage.mark_returning(instance.pool.cost)
        self._state.decisions.append(StopInstance(instance.name, instance.pool.spec))

    def stuck(self, instance: Instance, now: float) -> None:
        """An instance could not be stopped."""
        self.budget_usage.unmark_returning(instance.pool.cost)
        instance.pool.set_state(instance, InstanceState.STUCK, now)

    def removed(self, instance: Instance, now: float) -> None:
        """An instance has been removed."""
        if instance.state is InstanceState.STUCK:
            self.budget_usage.mark_returning(instance.pool.cost)
        self.budget_usage.returned(instance.pool.cost)
        instance.pool.remove(instance)
        del self._state.instances[instance.name]
        if instance.has_started:
            for pool in list(self._disk_full_pools):
                if self._state.pools.get(pool.spec) is not pool:  # forgotten
                    del self._disk_full_pools[pool]
                    continue
                pool.backoff.space_freed(now)
                self.demand_changed(pool, now)

    def should_stop(self, instance: Instance, now: float) -> bool:
        """Whether an instance without owners should stop rather than become idle."""
        pool = instance.pool
        if pool.has_reached_max_uses(instance) or (pool.spec.is_single_use and not instance.shared):
            return True
        short_pool = self._start_queues[True].peek()
        if (
            short_pool is None
            or short_pool is pool
            or not _helps(self.budget_usage.shortage(short_pool.cost), pool.cost)
        ):
            return False
        own, other = pool.first_unserved(), short_pool.first_unserved()
        assert other is not None  # a queued pool has an unserved waiter
        return own is None or (other.order < own.order and now - other.since >= EVICTION_WAIT_S)

    def instances_using_shortage(self, pool: InstancePool) -> list[Instance]:
        """The instances that use the budget that a pool's next start lacks.

        Empty if the budget will suffice once all stopping instances are gone.
        """
        if not any(short := self.budget_usage.shortage(pool.cost)):
            return []
        return [instance for instance in self._state.instances.values() if _helps(short, instance.pool.cost)]

    def ahead_in_start_queue(self, pool: InstancePool) -> Waiter | None:
        """Return the waiter whose start comes before that of a pool; None if the pool is first."""
        first = self._start_queues[pool.uses_budget].peek()
        return None if first is None or first is pool else first.first_unserved()

    # --- timers -------------------------------------------------------------------------------------------------------

    def timer_due(self, instance: Instance, now: float) -> None:
        """Stop an instance that has been idle for too long, or check it if that is due."""
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
                self._state.decisions.append(CheckInstance(instance.name, spec))
        self._set_timer(instance, now)

    def _set_timer(self, instance: Instance, now: float) -> None:
        """Set the timer of the next idle timeout or health check. State changes until then do not reset it."""
        spec, due = instance.pool.spec, []
        if spec.check_interval_s is not None:
            due.append(instance.checked + spec.check_interval_s)
        if spec.idle_timeout_s is not None:
            idle_since = instance.since if instance.state is InstanceState.IDLE else now
            ends = idle_since + spec.idle_timeout_s
            due.append(ends if ends > now else now + spec.idle_timeout_s)
        instance.timer = self._state.timers.set(min(due), instance) if due else None


def _helps(short: tuple[bool, ...], cost: ResourceCost) -> bool:
    return any(lacking and amount > 0 for lacking, amount in zip(short, cost, strict=True))

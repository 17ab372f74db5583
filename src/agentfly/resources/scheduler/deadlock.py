"""Deadlock detection: owners that each wait for something only the others could release.

A waiter is deadlocked if all of its blockers wait as well, and all of their blockers, and so on: a knot in the wait
graph (the OR model: the release of one of several blockers is enough). A waiter with a reserved idle instance can also
release it, by giving the reservation up. A request for several specs is deadlocked as soon as one of its waits is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from agentfly.core.errors import DeadlockBroken
from agentfly.resources.resource import Scope
from agentfly.resources.scheduler.pool import BECOMING_READY, Hold, Instance, InstanceState, Owner, Waiter
from agentfly.resources.scheduler.provisioner import Provisioner
from agentfly.resources.scheduler.state import SchedulerState

Blocker = Hold | Waiter
"""A blocker of a waiter: a hold that must end, or another waiter that must be served."""

BlockersOf = Callable[[Waiter], Iterable[Blocker]]
"""Returns the blockers of a waiter, one of which must go; none if the waiter can make progress anyway."""

DeadlockSet = dict[Waiter, list[Blocker]]
"""The deadlocked waiters, each with its blockers."""


def find_deadlock(waiter: Waiter, owners: Mapping[str, Owner], blockers_of: BlockersOf) -> DeadlockSet:
    """Find the deadlock that a waiter or one of its siblings is part of.

    Return each deadlocked waiter with its blockers; nothing if the waiter can make progress. The search stops as soon
    as this is known. Without a deadlock it is cheap for any number of waiters.
    """
    stuck: DeadlockSet = {}  # a waiter that can make progress has an empty list
    behind: dict[Waiter, list[tuple[Waiter, Waiter]]] = {}  # the waiters that a waiter, once served, can unblock
    first = _unserved(waiter)
    unseen = list(first)
    while unseen:
        current = unseen.pop()
        if current in stuck:
            continue
        blockers = list(blockers_of(current))
        waits = [_waits_of_blocker(blocker, owners) for blocker in blockers]
        stuck[current] = (
            blockers if all(waits) and not any(_will_end(wait, stuck) for wait in chain.from_iterable(waits)) else []
        )
        if not stuck[current]:
            _mark_unblocked(current, stuck, behind)
            if not any(stuck.get(one, True) for one in first):
                return {}
            continue
        for wait in chain.from_iterable(waits):
            for sibling in _unserved(wait):
                behind.setdefault(sibling, []).append((current, wait))
                unseen.append(sibling)
    return _reachable(waiter, owners, stuck)


def _will_end(wait: Waiter, stuck: DeadlockSet) -> bool:
    """Return whether a waiter and all its siblings are known to make progress."""
    return not any(stuck.get(one, True) for one in _unserved(wait))


def _mark_unblocked(waiter: Waiter, stuck: DeadlockSet, behind: dict[Waiter, list[tuple[Waiter, Waiter]]]) -> None:
    """Mark the waiters that are unblocked by a waiter that makes progress."""
    moving = [waiter]
    while moving:
        for one, wait in behind.pop(moving.pop(), ()):
            if stuck[one] and _will_end(wait, stuck):
                stuck[one] = []
                moving.append(one)


def _reachable(waiter: Waiter, owners: Mapping[str, Owner], stuck: DeadlockSet) -> DeadlockSet:
    """Return the deadlocked waiters reachable from one waiter."""
    deadlock: DeadlockSet = {}
    unseen = _unserved(waiter)
    while unseen:
        current = unseen.pop()
        if stuck[current] and current not in deadlock:
            deadlock[current] = stuck[current]
            waits = (wait for blocker in deadlock[current] for wait in _waits_of_blocker(blocker, owners))
            unseen += [sibling for wait in waits for sibling in _unserved(wait)]
    return deadlock


def _unserved(waiter: Waiter) -> list[Waiter]:
    """Return a waiter and its siblings, without those that have a reserved instance."""
    return [sibling for sibling in waiter.siblings if not sibling.reserved]


def _waits_of_blocker(blocker: Blocker, owners: Mapping[str, Owner]) -> list[Waiter]:
    """Return waiters, one of which must be served before a blocker releases; none if it releases anyway."""
    return [blocker] if isinstance(blocker, Waiter) else waits_of(blocker, owners)


def reserved_waiters(deadlock: DeadlockSet) -> Iterator[Waiter]:
    """Waiters with reserved instances that others in the deadlock could use."""
    for blockers in deadlock.values():
        yield from (blocker for blocker in blockers if isinstance(blocker, Waiter) and blocker.reserved)


def waits_of(holding: Hold, owners: Mapping[str, Owner]) -> list[Waiter]:
    """Return the waiters that prevent a holder's release. A hold of scope `call` depends only on its caller's waits."""
    waits = owners[holding.owner].waiters.values()
    if holding.scope is Scope.CALL:
        caller = holding.caller
        return [waiter for waiter in waits if any(caller in request.callers for request in waiter.requests.values())]
    return list(waits)


def youngest_holder(deadlock: DeadlockSet, owners: Mapping[str, Owner]) -> str | None:
    """Return the deadlocked holder that began to hold last, so that the least work is lost."""

    def age(owner: Owner) -> tuple[float, int]:
        first = next(iter(owner.holdings.values()))
        return (first.since, first.id)

    inside = {waiter.owner: owners[waiter.owner] for waiter in deadlock if owners[waiter.owner].holdings}
    return max(inside.values(), key=age).name if inside else None


def deadlock_error(victim: str, deadlock: DeadlockSet, now: float) -> DeadlockBroken:
    """Return the error for the owner whose request fails. It names the cycle."""
    shown = 8
    lines = []
    for waiter, blockers in list(deadlock.items())[:shown]:
        holders = ", ".join(_describe_blocker(blocker, now) for blocker in blockers[:shown])
        lines.append(f"{waiter.owner} waits for {waiter.pool.spec.label}, which is held by {holders}")
    if len(deadlock) > shown:
        lines.append(f"and {len(deadlock) - shown} waits more")
    cycle = "; ".join(lines)
    if {waiter.owner for waiter in deadlock} == {victim}:
        cure = (
            "It waits for an instance that only it could release: use the instance that it has, or raise the capacity."
        )
    else:
        cure = (
            f"The wait of {victim}, which has held its instances for the shortest time, was ended so that the others "
            "can continue. Retry it, acquire the resources in the same order everywhere, or raise a capacity."
        )
    return DeadlockBroken(f"Deadlock: {cycle}. {cure}")


def _describe_blocker(blocker: Blocker, now: float) -> str:
    if isinstance(blocker, Waiter):
        condition = "its other resources are free" if blocker.reserved else f"{blocker.pool.spec.label} is free"
        return f"no owner, but is reserved for {blocker.owner} until {condition}"
    return f"{blocker.owner} (has had {blocker.instance.name} for {now - blocker.since:.1f} s)"


class WaitGraph:
    """Finds the blockers of waiters in the scheduler's records."""

    def __init__(self, state: SchedulerState, provisioner: Provisioner) -> None:
        self._state = state
        self._provisioner = provisioner

    def blockers_of(self, waiter: Waiter) -> list[Blocker]:
        """Return the holds and waiters that block a waiter.

        The list is empty if the waiter will be served without any of them: an instance is starting or resetting, one of
        a full pool is stopping, or a delayed start will be retried. Stuck instances do not count. A pool below its
        capacity waits for the budget. If stopping instances will free enough of it, the waiter waits for those ahead of
        it in the start queue, which only holders overtake, and otherwise for the end of another start.
        """
        pool, before = waiter.pool, self._instances_before(waiter)
        if (
            pool.backoff.blocks_waiters
            or pool.becoming_ready()
            or (pool.is_full() and pool.counts[InstanceState.STOPPING])
        ):
            return []
        if any(instance.state in BECOMING_READY for instance in before):
            return []
        if not before and waiter.owner not in self._state.holding_and_waiting:
            first = self._provisioner.ahead_in_start_queue(pool)
            return [] if first is None else [first]
        keeping = {instance.pool: None for instance in before if instance.name in instance.pool.idle}
        kept = [one for pool in keeping for one in pool.reservations.values() if one.siblings is not waiter.siblings]
        return [*_holdings_of(before), *kept]

    def holds_blocking(self, waiter: Waiter) -> list[Hold]:
        """Return the holds on the instances that a waiter waits for."""
        return _holdings_of(self._instances_before(waiter))

    def _instances_before(self, waiter: Waiter) -> list[Instance]:
        """Return the instances of a full pool, or its full replicas; otherwise those that use the missing budget."""
        pool = waiter.pool
        if waiter.scope is Scope.GLOBAL and pool.replicas_are_full():
            return list(pool.replicas.values())
        return list(pool.instances.values()) if pool.is_full() else self._provisioner.instances_using_shortage(pool)


def _holdings_of(instances: list[Instance]) -> list[Hold]:
    return [holding for instance in instances for holding in instance.holdings.values()]

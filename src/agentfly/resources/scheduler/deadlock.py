"""Deadlock detection: owners that each wait for something only the others could release.

A waiter is deadlocked if everyone who could make room for it waits too, and everyone who could make room for those, and
so on: a knot in the wait graph (the OR model: one of several holders is enough to continue). A waiter with a reserved
idle instance can also make room, by giving the reservation up. A request for several specs is deadlocked as soon as one
of its waits is.
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
"""What is in somebody's way: a holding that must end, or another who waits and must be served."""

BlockersOf = Callable[[Waiter], Iterable[Blocker]]
"""The obstacles any one of which must go before a waiter can go on; none if it will go on without."""

DeadlockSet = dict[Waiter, list[Blocker]]
"""Who waits in vain because of whom."""


def find_deadlock(waiter: Waiter, owners: Mapping[str, Owner], in_the_way: BlockersOf) -> DeadlockSet:
    """Who waits in vain because of whom, if ``waiter`` or a partner of it waits in vain; otherwise nothing.

    It looks no further than it takes to see that the waiter will go on, so that it costs next to nothing where there is
    no deadlock, however many wait.
    """
    stuck: DeadlockSet = {}  # nothing is in the way of those who go on
    behind: dict[Waiter, list[tuple[Waiter, Waiter]]] = {}  # who goes on once a wait has ended, by what that needs
    first = _unserved(waiter)
    unseen = list(first)
    while unseen:
        current = unseen.pop()
        if current in stuck:
            continue
        obstacles = list(in_the_way(current))
        waits = [_waits_of_blocker(obstacle, owners) for obstacle in obstacles]
        stuck[current] = (
            obstacles if all(waits) and not any(_will_end(wait, stuck) for wait in chain.from_iterable(waits)) else []
        )
        if not stuck[current]:
            _mark_unblocked(current, stuck, behind)
            if not any(stuck.get(one, True) for one in first):
                return {}
            continue
        for wait in chain.from_iterable(waits):
            for partner in _unserved(wait):
                behind.setdefault(partner, []).append((current, wait))
                unseen.append(partner)
    return _reachable(waiter, owners, stuck)


def _will_end(wait: Waiter, stuck: DeadlockSet) -> bool:
    """Whether all that a wait needs is known to come."""
    return not any(stuck.get(one, True) for one in _unserved(wait))


def _mark_unblocked(waiter: Waiter, stuck: DeadlockSet, behind: dict[Waiter, list[tuple[Waiter, Waiter]]]) -> None:
    """Note that those go on too who have a waiter, that goes on, in their way."""
    going = [waiter]
    while going:
        for one, wait in behind.pop(going.pop(), ()):
            if stuck[one] and _will_end(wait, stuck):
                stuck[one] = []
                going.append(one)


def _reachable(waiter: Waiter, owners: Mapping[str, Owner], stuck: DeadlockSet) -> DeadlockSet:
    """The part of those who are stuck that has to do with one of them."""
    knot: DeadlockSet = {}
    unseen = _unserved(waiter)
    while unseen:
        current = unseen.pop()
        if stuck[current] and current not in knot:
            knot[current] = stuck[current]
            waits = (wait for obstacle in knot[current] for wait in _waits_of_blocker(obstacle, owners))
            unseen += [partner for wait in waits for partner in _unserved(wait)]
    return knot


def _unserved(waiter: Waiter) -> list[Waiter]:
    """What a waiter and its partners, all of which must be served, have nothing ready for."""
    return [partner for partner in waiter.siblings if not partner.reserved]


def _waits_of_blocker(obstacle: Blocker, owners: Mapping[str, Owner]) -> list[Waiter]:
    """The waits any one of which must end before an obstacle can go; none if it goes anyway."""
    return [obstacle] if isinstance(obstacle, Waiter) else waits_of(obstacle, owners)


def reserved_waiters(knot: DeadlockSet) -> Iterator[Waiter]:
    """Those for whom something is kept that others in a knot could use."""
    for obstacles in knot.values():
        yield from (obstacle for obstacle in obstacles if isinstance(obstacle, Waiter) and obstacle.reserved)


def waits_of(holding: Hold, owners: Mapping[str, Owner]) -> list[Waiter]:
    """What keeps a holder from giving back. What is held for a call ends with the call, so only its own waits do."""
    waits = owners[holding.owner].waiters.values()
    if holding.scope is Scope.CALL:
        caller = holding.caller
        return [waiter for waiter in waits if any(caller in request.callers for request in waiter.requests.values())]
    return list(waits)


def youngest_holder(knot: DeadlockSet, owners: Mapping[str, Owner]) -> str | None:
    """Of those in a knot who hold something, the one whose first holding is the latest: with the least to do again."""

    def age(owner: Owner) -> tuple[float, int]:
        first = next(iter(owner.holdings.values()))
        return (first.since, first.id)

    inside = {waiter.owner: owners[waiter.owner] for waiter in knot if owners[waiter.owner].holdings}
    return max(inside.values(), key=age).name if inside else None


def deadlock_error(victim: str, knot: DeadlockSet, now: float) -> DeadlockBroken:
    """The error for the owner whose wait is failed, naming the cycle."""
    shown = 8
    lines = []
    for waiter, obstacles in list(knot.items())[:shown]:
        holders = ", ".join(_describe_blocker(obstacle, now) for obstacle in obstacles[:shown])
        lines.append(f"{waiter.owner} waits for {waiter.pool.spec.label}, which is held by {holders}")
    if len(knot) > shown:
        lines.append(f"and {len(knot) - shown} waits more")
    cycle = "; ".join(lines)
    if {waiter.owner for waiter in knot} == {victim}:
        cure = "It waits for what only itself could give back: use the instance that it has, or raise the capacity."
    else:
        cure = (
            f"The wait of {victim}, who has held for the shortest time, was ended so that the others can go on. Retry "
            "it, take the resources in the same order everywhere, or raise a capacity."
        )
    return DeadlockBroken(f"Deadlock: {cycle}. {cure}")


def _describe_blocker(obstacle: Blocker, now: float) -> str:
    if isinstance(obstacle, Waiter):
        wants = "what it wants besides comes free" if obstacle.reserved else f"{obstacle.pool.spec.label} comes free"
        return f"nobody, but kept for {obstacle.owner} until {wants}"
    return f"{obstacle.owner} (has {obstacle.instance.name} since {now - obstacle.since:.1f} s)"


class WaitGraph:
    """Reads from the books and the supply why somebody has nothing yet."""

    def __init__(self, books: SchedulerState, supply: Provisioner) -> None:
        self._books = books
        self._supply = supply

    def blockers_of(self, waiter: Waiter) -> list[Blocker]:
        """What must go before a waiter can go on; none if it will go on without.

        Something else will help it if an instance is coming or, in a full pool, going, or if a start that is put off
        will be tried. What is merely stuck will not,
        nor what moves elsewhere. A pool that may start another one waits for the budget. If what is on its way out
        leaves enough of that, it waits for those before it in the line of starts, whom only holders pass by; and if
        there are none, for a place to start, and every start ends.
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
        if not before and waiter.owner not in self._books.holding_and_waiting:
            first = self._supply.ahead_in_start_queue(pool)
            return [] if first is None else [first]
        keeping = {instance.pool: None for instance in before if instance.name in instance.pool.idle}
        kept = [one for pool in keeping for one in pool.reservations.values() if one.siblings is not waiter.siblings]
        return [*_holdings_of(before), *kept]

    def holds_blocking(self, waiter: Waiter) -> list[Hold]:
        """Who has what a waiter waits for."""
        return _holdings_of(self._instances_before(waiter))

    def _instances_before(self, waiter: Waiter) -> list[Instance]:
        """What is alive of the pool, or shared, if that is full, and otherwise what takes the budget that is short."""
        pool = waiter.pool
        if waiter.scope is Scope.GLOBAL and pool.replicas_are_full():
            return list(pool.replicas.values())
        return list(pool.instances.values()) if pool.is_full() else self._supply.instances_using_shortage(pool)


def _holdings_of(instances: list[Instance]) -> list[Hold]:
    return [holding for instance in instances for holding in instance.holdings.values()]

"""Deadlock: owners who each wait for what only the others could give back.

A waiter is stuck for good when everybody who could make room for it waits too, and everybody who could make room for
those, and so on: a knot in the graph of waits (the OR model: any one of several holders is enough to go on). Room could
be made too by one for whom an idle instance is kept until what it wants besides comes free; and who waits for several
things at once is stuck as soon as one of these waits is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from agentfly.errors import DeadlockBroken
from agentfly.resources.scheduler.pool import Holding, Owner, Waiter
from agentfly.resources.scope import Scope

Obstacle = Holding | Waiter
"""What is in somebody's way: a holding that must end, or another who waits and must be served."""

InTheWay = Callable[[Waiter], Iterable[Obstacle]]
"""The obstacles any one of which must go before a waiter can go on; none if it will go on without."""

Knot = dict[Waiter, list[Obstacle]]
"""Who waits in vain because of whom."""


def find_knot(waiter: Waiter, owners: Mapping[str, Owner], in_the_way: InTheWay) -> Knot:
    """Who waits in vain because of whom, if ``waiter`` or a partner of it waits in vain; otherwise nothing.

    It looks no further than it takes to see that the waiter will go on, so that it costs next to nothing where there is
    no deadlock, however many wait.
    """
    stuck: Knot = {}  # nothing is in the way of those who go on
    behind: dict[Waiter, list[tuple[Waiter, Waiter]]] = {}  # who goes on once a wait has ended, by what that needs
    first = _lacking(waiter)
    unseen = list(first)
    while unseen:
        current = unseen.pop()
        if current in stuck:
            continue
        obstacles = list(in_the_way(current))
        waits = [_waits_before(obstacle, owners) for obstacle in obstacles]
        stuck[current] = (
            obstacles if all(waits) and not any(_ends(wait, stuck) for wait in chain.from_iterable(waits)) else []
        )
        if not stuck[current]:
            _let_go_on(current, stuck, behind)
            if not any(stuck.get(one, True) for one in first):
                return {}
            continue
        for wait in chain.from_iterable(waits):
            for partner in _lacking(wait):
                behind.setdefault(partner, []).append((current, wait))
                unseen.append(partner)
    return _reachable(waiter, owners, stuck)


def _ends(wait: Waiter, stuck: Knot) -> bool:
    """Whether all that a wait needs is known to come."""
    return not any(stuck.get(one, True) for one in _lacking(wait))


def _let_go_on(waiter: Waiter, stuck: Knot, behind: dict[Waiter, list[tuple[Waiter, Waiter]]]) -> None:
    """Note that those go on too who have a waiter, that goes on, in their way."""
    going = [waiter]
    while going:
        for one, wait in behind.pop(going.pop(), ()):
            if stuck[one] and _ends(wait, stuck):
                stuck[one] = []
                going.append(one)


def _reachable(waiter: Waiter, owners: Mapping[str, Owner], stuck: Knot) -> Knot:
    """The part of those who are stuck that has to do with one of them."""
    knot: Knot = {}
    unseen = _lacking(waiter)
    while unseen:
        current = unseen.pop()
        if stuck[current] and current not in knot:
            knot[current] = stuck[current]
            waits = (wait for obstacle in knot[current] for wait in _waits_before(obstacle, owners))
            unseen += [partner for wait in waits for partner in _lacking(wait)]
    return knot


def _lacking(waiter: Waiter) -> list[Waiter]:
    """What a waiter and its partners, all of which must be served, have nothing ready for."""
    return [partner for partner in waiter.partners if not partner.kept]


def _waits_before(obstacle: Obstacle, owners: Mapping[str, Owner]) -> list[Waiter]:
    """The waits any one of which must end before an obstacle can go; none if it goes anyway."""
    return [obstacle] if isinstance(obstacle, Waiter) else waits_of(obstacle, owners)


def keepers(knot: Knot) -> Iterator[Waiter]:
    """Those for whom something is kept that others in a knot could use."""
    for obstacles in knot.values():
        yield from (obstacle for obstacle in obstacles if isinstance(obstacle, Waiter) and obstacle.kept)


def waits_of(holding: Holding, owners: Mapping[str, Owner]) -> list[Waiter]:
    """What keeps a holder from giving back. What is held for a call ends with the call, so only its own waits do."""
    waits = owners[holding.owner].waiters.values()
    if holding.scope is Scope.CALL:
        caller = holding.caller
        return [waiter for waiter in waits if any(caller in request.callers for request in waiter.requests.values())]
    return list(waits)


def youngest(knot: Knot, owners: Mapping[str, Owner]) -> str | None:
    """Of those in a knot who hold something, the one whose first holding is the latest: with the least to do again."""

    def age(owner: Owner) -> tuple[float, int]:
        first = next(iter(owner.holdings.values()))
        return (first.since, first.id)

    inside = {waiter.owner: owners[waiter.owner] for waiter in knot if owners[waiter.owner].holdings}
    return max(inside.values(), key=age).name if inside else None


def broken(victim: str, knot: Knot, now: float) -> DeadlockBroken:
    """The error for the owner whose wait is failed, naming the cycle."""
    shown = 8
    lines = []
    for waiter, obstacles in list(knot.items())[:shown]:
        holders = ", ".join(_words(obstacle, now) for obstacle in obstacles[:shown])
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


def _words(obstacle: Obstacle, now: float) -> str:
    if isinstance(obstacle, Waiter):
        wants = "what it wants besides comes free" if obstacle.kept else f"{obstacle.pool.spec.label} comes free"
        return f"nobody, but kept for {obstacle.owner} until {wants}"
    return f"{obstacle.owner} (has {obstacle.instance.name} since {now - obstacle.since:.1f} s)"

"""Deadlock: owners who each wait for what only the others could give back.

A waiter is stuck for good when everybody who could make room for it waits too, and everybody who could make room for
those, and so on: a knot in the graph of waits (the OR model: any one of several holders is enough to go on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from agentfly.errors import DeadlockBroken
from agentfly.resources.pool import Holding, Owner, Waiter
from agentfly.resources.scope import Scope

InTheWay = Callable[[Waiter], Iterable[Holding]]
"""The holdings any one of which must end before a waiter can go on; none if it will go on without."""


def find_knot(waiter: Waiter, owners: Mapping[str, Owner], in_the_way: InTheWay) -> dict[Waiter, list[Holding]]:
    """Who waits in vain because of whom, if ``waiter`` waits in vain; otherwise nothing.

    It stops at the first holder who can still go on, so that it costs next to nothing where there is no deadlock.
    """
    knot: dict[Waiter, list[Holding]] = {}
    unseen = [waiter]
    while unseen:
        current = unseen.pop()
        if current in knot:
            continue
        knot[current] = list(in_the_way(current))
        if not knot[current]:
            return {}
        for holding in knot[current]:
            waits = waits_of(holding, owners)
            if not waits:
                return {}
            unseen += waits
    return knot


def waits_of(holding: Holding, owners: Mapping[str, Owner]) -> list[Waiter]:
    """What keeps a holder from giving back. What is held for a call ends with the call, so only its own waits do."""
    waits = owners[holding.owner].waiters.values()
    if holding.scope is Scope.CALL:
        caller = holding.caller
        return [waiter for waiter in waits if any(caller in request.callers for request in waiter.requests.values())]
    return list(waits)


def youngest(knot: Mapping[Waiter, list[Holding]], owners: Mapping[str, Owner]) -> Owner:
    """Of the owners in a knot, the one whose first holding is the latest: the one with the least to do again."""

    def age(owner: Owner) -> tuple[float, int]:
        first = next(iter(owner.holdings.values()))
        return (first.since, first.id)

    inside = {waiter.owner: owners[waiter.owner] for waiter in knot if owners[waiter.owner].holdings}
    return max(inside.values(), key=age)


def broken(victim: str, knot: Mapping[Waiter, list[Holding]], now: float) -> DeadlockBroken:
    """The error for the owner whose wait is failed, naming the cycle."""
    shown = 8
    lines = []
    for waiter, holdings in list(knot.items())[:shown]:
        holders = ", ".join(
            f"{holding.owner} (has {holding.instance.name} since {now - holding.since:.1f} s)"
            for holding in holdings[:shown]
        )
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

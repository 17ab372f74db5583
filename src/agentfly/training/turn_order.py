"""Turn order: which turns of a trajectory led straight to which, where only some of the turns count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def followed_among(follows: Mapping[int, Sequence[int] | None], kept: Collection[int]) -> dict[int, tuple[int, ...]]:
    """For each turn that is kept, the kept turns that it follows. Those left out are passed through to those before.

    Args:
        follows: by the number of a turn, the numbers of the turns that it follows, each below its own; None for the
            turn before it. A turn that is followed and is not among the keys is passed over.
        kept: the numbers of the turns that count.
    """
    found: dict[int, tuple[int, ...]] = {}
    before: int | None = None
    for number in sorted(follows):
        direct = follows[number]
        if direct is None:
            direct = () if before is None else (before,)
        reached = dict.fromkeys(
            kept_one for one in direct for kept_one in ((one,) if one in kept else found.get(one, ()))
        )
        found[number] = tuple(reached)
        before = number
    return {number: found[number] for number in found if number in kept}


def followers_of(follows: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The inverse: for each turn, the turns that follow it."""
    followers: dict[int, list[int]] = {number: [] for number in follows}
    for number, before in follows.items():
        for one in before:
            followers[one].append(number)
    return followers

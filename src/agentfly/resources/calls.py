"""Calls: those of owners that are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Calls:
    """The calls that are under way.

    Args:
        over: told of each owner whose last call has ended.
    """

    def __init__(self, over: Callable[[str], None]) -> None:
        self._over = over
        self._under_way: Counter[str] = Counter()

    def __contains__(self, owner: str) -> bool:
        return owner in self._under_way

    def one(self, owner: str) -> OneCall:
        """A call of an owner, as a block."""
        return OneCall(self, owner)


class OneCall:
    """A call, under way while its block runs."""

    __slots__ = ("_calls", "_owner")

    def __init__(self, calls: Calls, owner: str) -> None:
        self._calls = calls
        self._owner = owner

    def __enter__(self) -> None:
        self._calls._under_way[self._owner] += 1

    def __exit__(self, *_: object) -> None:
        calls, owner = self._calls, self._owner
        calls._under_way[owner] -= 1
        if not calls._under_way[owner]:
            del calls._under_way[owner]
            calls._over(owner)

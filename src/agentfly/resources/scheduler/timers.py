"""Timers: what is due when, without a clock."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any


class Timers:
    """What is due when. Setting, dropping and asking cost no more than a logarithm of how many there are."""

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [when, order, what]; what is None once dropped
        self._order = count()
        self._dropped = 0

    def set(self, when: float, what: Any) -> list[Any]:
        """Have ``what`` come due at ``when``. Returns a token for `drop`."""
        token = [when, next(self._order), what]
        heapq.heappush(self._heap, token)
        return token

    def drop(self, token: list[Any]) -> None:
        """Forget what has not come due yet; nothing happens if it has."""
        if token[2] is None:
            return
        token[2] = None
        self._dropped += 1
        if self._dropped > 100 and 2 * self._dropped > len(self._heap):
            self._heap = [kept for kept in self._heap if kept[2] is not None]
            heapq.heapify(self._heap)
            self._dropped = 0

    def next(self) -> float | None:
        """When something is due next."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
            self._dropped -= 1
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Any]:
        """What has come due, in order; it is due once."""
        found = []
        while (when := self.next()) is not None and when <= now:
            token = heapq.heappop(self._heap)
            found.append(token[2])
            token[2] = None
        return found

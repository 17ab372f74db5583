"""StartLine: the pools that want to start an instance and cannot yet, in the order of who waits for it."""

from __future__ import annotations

import heapq
from itertools import count

from agentfly.resources.scheduler.pool import Pool


class StartLine:
    """Pools that want a start. A pool's place is that of the first in it whom nothing is coming for."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Pool]] = []  # an entry whose pool has another key is void
        self._order = count()

    def join(self, pool: Pool) -> None:
        """Have a pool stand where the first in it who lacks an instance belongs."""
        first = pool.lacking()
        if first is not None and pool.line_key != first.order:
            pool.line_key = first.order
            heapq.heappush(self._heap, (first.order, next(self._order), pool))

    def leave(self, pool: Pool) -> None:
        """Take a pool out of the line."""
        pool.line_key = None

    def first(self) -> Pool | None:
        """Whose turn it is."""
        while self._heap:
            key, _, pool = self._heap[0]
            wants = pool.line_key == key and pool.missing() > 0
            if wants and (first := pool.lacking()) is not None and first.order == key:
                return pool
            heapq.heappop(self._heap)
            if pool.line_key == key:
                self.leave(pool)
            if wants:
                self.join(pool)
        return None

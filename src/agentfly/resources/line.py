"""StartLine: the pools that want to start an instance and cannot yet, in the order of their first waiters."""

from __future__ import annotations

import heapq
from itertools import count

from agentfly.resources.pool import Pool


class StartLine:
    """Pools that want a start. The place of a pool is the place of whoever waits first in it."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Pool]] = []  # an entry whose pool has another key is void
        self._order = count()

    def join(self, pool: Pool) -> None:
        """Have a pool stand where its first waiter belongs. The pool has one."""
        first = pool.queue.first()
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
            if pool.line_key == key and pool.missing() > 0:
                first = pool.queue.first()
                if first is not None and first.order == key:
                    return pool
                self.join(pool)
            elif pool.line_key == key:
                self.leave(pool)
            heapq.heappop(self._heap)
        return None

"""HeavyWork: what takes long enough to hold up the event loop, done on threads, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from agentfly.threads.pool import on_thread_to_its_end

T = TypeVar("T")

HEAVY_CHARS = 32_768
"""From so many characters or bytes on, reading or rendering them is heavy work: it takes milliseconds."""

AT_A_TIME = 2


class HeavyWork:
    """Does work on the event loop where there is little of it, and otherwise on a thread.

    Work that was begun is waited for even where nobody wants it any more, so that callers who give up cannot pile it
    up.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_A_TIME)

    async def do(self, work: Callable[[], T], *, size: int) -> T:
        """What work gives.

        Args:
            work: the work; it must be of a kind that a thread can do.
            size: how many characters or bytes it is about.
        """
        if size < HEAVY_CHARS:
            return work()
        async with self._free:
            return await on_thread_to_its_end(work)

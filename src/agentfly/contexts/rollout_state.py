"""State of one rollout: objects that its tools keep between calls, and timers of its waits for resources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from agentfly.core.errors import ResourceError
from agentfly.core.signals import should_propagate

T = TypeVar("T")

CLOSE_S = 10.0
"""Time limit in seconds for closing a cached object; after that it is abandoned."""

logger = logging.getLogger(__name__)


class RolloutCache:
    """Objects of a rollout, created on first use and closed in reverse order."""

    def __init__(self) -> None:
        self._kept: dict[object, _CachedObject[Any]] = {}
        self._closing = False

    async def get(
        self,
        key: object,
        make: Callable[[], Coroutine[Any, Any, T]],
        close: Callable[[T], Awaitable[object]],
    ) -> T:
        """Return the object for a key. The first request creates it.

        The creation continues after a cancellation of the request, so that the object can be closed. A failure is not
        cached: the next request tries again.

        Raises:
            ResourceError: the rollout has ended.
            Exception: any exception of ``make``.
        """
        if self._closing:
            raise ResourceError("The rollout is at its end, and makes nothing more. A tool may have outlived it.")
        kept: _CachedObject[T] | None = self._kept.get(key)
        if kept is None or kept.failed:
            self._kept.pop(key, None)  # keeps the dict in the order of creation
            kept = self._kept[key] = _CachedObject(asyncio.create_task(make()), close)
        return await asyncio.shield(kept.making)

    async def close(self) -> None:
        """Close all objects. A close that fails or takes too long is logged and abandoned."""
        self._closing = True
        task = asyncio.current_task()
        while self._kept:
            key, kept = self._kept.popitem()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await kept.close()
            except TimeoutError:
                logger.warning("%r was not closed within %g s and is left alone.", key, CLOSE_S)
            except BaseException as error:  # also SystemExit, and a cancellation that nobody requested
                if should_propagate(error, task) or (
                    isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling())
                ):
                    raise
                logger.warning("Closing %r failed.", key, exc_info=error)


class _CachedObject(Generic[T]):
    def __init__(self, making: asyncio.Task[T], close: Callable[[T], Awaitable[object]]) -> None:
        self.making = making
        self._close = close
        making.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the request may have been cancelled

    @property
    def failed(self) -> bool:
        return self.making.done() and (self.making.cancelled() or self.making.exception() is not None)

    async def close(self) -> None:
        await asyncio.wait({self.making})
        if not self.failed:
            await self._close(self.making.result())


_counting: ContextVar[tuple[WaitTimer, ...]] = ContextVar("counting", default=())


class WaitTimer:
    """Measures the time during which at least one wait is in progress. Simultaneous waits count once.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._ended_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, including a wait in progress."""
        return self._ended_seconds + (self._clock() - self._since if self._running else 0.0)

    @contextmanager
    def count_all(self) -> Iterator[None]:
        """Count every wait that code in the block begins, through any context of the rollout."""
        token = _counting.set((*_counting.get(), self))
        try:
            yield
        finally:
            _counting.reset(token)

    def begin(self) -> None:
        """A wait begins."""
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def end(self) -> None:
        """A wait has ended."""
        self._running -= 1
        if not self._running:
            self._ended_seconds += self._clock() - self._since


@contextmanager
def waiting(*counters: WaitTimer) -> Iterator[None]:
    """Count the block as a wait in each of ``counters``, and in those that count all waits of this code."""
    timers = dict.fromkeys((*counters, *_counting.get()))
    for timer in timers:
        timer.begin()
    try:
        yield
    finally:
        for timer in timers:
            timer.end()

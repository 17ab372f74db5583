"""Belongings: what the tools of one rollout keep between its calls, and what is closed when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from agentfly.errors import ResourceError
from agentfly.interruption import must_pass

T = TypeVar("T")

CLOSE_S = 10.0
"""Seconds that something may take to be closed before the rollout goes on without it."""

logger = logging.getLogger(__name__)


class Belongings:
    """Objects of a rollout, each made at its first need, and closed in the opposite order."""

    def __init__(self) -> None:
        self._kept: dict[object, _Belonging[Any]] = {}
        self._closing = False

    async def get(
        self,
        key: object,
        make: Callable[[], Coroutine[Any, Any, T]],
        close: Callable[[T], Awaitable[object]],
    ) -> T:
        """The object of this key: the same one for all who ask, made by the first.

        A making goes on though whoever asked for it gives up, so that what it makes can be closed. One that failed is
        not kept: whoever asks next has it made anew.

        Raises:
            ResourceError: the rollout is at its end.
            Exception: what making it raises.
        """
        if self._closing:
            raise ResourceError("The rollout is at its end, and makes nothing more. A tool may have outlived it.")
        kept: _Belonging[T] | None = self._kept.get(key)
        if kept is None or kept.failed:
            self._kept.pop(key, None)  # so that the order is that of making
            kept = self._kept[key] = _Belonging(asyncio.create_task(make()), close)
        return await asyncio.shield(kept.making)

    async def close(self) -> None:
        """Close everything. What fails at that, or takes too long, is told in the log and left alone."""
        self._closing = True
        task = asyncio.current_task()
        while self._kept:
            key, kept = self._kept.popitem()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await kept.close()
            except TimeoutError:
                logger.warning("%r was not closed within %g s and is left alone.", key, CLOSE_S)
            except BaseException as error:  # SystemExit, and a cancellation that nobody asked for
                if must_pass(error, task) or (
                    isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling())
                ):
                    raise
                logger.warning("Closing %r failed.", key, exc_info=error)


class _Belonging(Generic[T]):
    def __init__(self, making: asyncio.Task[T], close: Callable[[T], Awaitable[object]]) -> None:
        self.making = making
        self._close = close
        making.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may be gone

    @property
    def failed(self) -> bool:
        return self.making.done() and (self.making.cancelled() or self.making.exception() is not None)

    async def close(self) -> None:
        await asyncio.wait({self.making})
        if not self.failed:
            await self._close(self.making.result())

"""Work: an operation on an instance that goes on in the background, within a time, and tells once how it went."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""Seconds that an operation has to end after it was cancelled. After that nobody waits for it."""

Operation = Callable[[], Coroutine[Any, Any, None]]
Report = Callable[[BaseException | None], None]
"""Called with None when all went well, and otherwise with what went wrong."""


class BackgroundOperation:
    """A start or a reset under way.

    Args:
        operation: what to do.
        limit_s: seconds it may take. It is cancelled then; it is given up if it takes no notice.
        what: what it is called in messages.
        report: called exactly once, unless `cancel` comes first.
    """

    def __init__(self, operation: Operation, limit_s: float, what: str, report: Report) -> None:
        loop = asyncio.get_running_loop()
        self._operation = operation
        self._limit_s = limit_s
        self._what = what
        self._report: Report | None = report
        self._overdue: TimeoutError | None = None
        self._timer = loop.call_later(limit_s, self._expire)
        self.task = loop.create_task(self._run(), name=what)

    async def cancel(self) -> None:
        """Have it end without a report; return when it has, or takes no notice."""
        self._timer.cancel()
        self._report = None
        await cancel_and_wait(self.task)

    async def _run(self) -> None:
        try:
            await self._operation()
        except BaseException as error:
            self._tell(self._overdue or error)
            if not isinstance(error, Exception) and self._overdue is None:
                raise
        else:
            self._tell(None)

    def _tell(self, error: BaseException | None) -> None:
        self._timer.cancel()
        report, self._report = self._report, None
        if report is not None:
            report(error)

    def _expire(self) -> None:
        self._overdue = TimeoutError(f"{self._what} took longer than its limit of {self._limit_s:g} s")
        self.task.cancel()
        self._timer = asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        logger.error("%s takes no notice of being cancelled and is left to itself.", self._what)
        self._tell(self._overdue)


async def wait_at_most(work: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
    """Wait for ``work``, at most for a time, also if it takes no notice of being cancelled.

    Raises:
        TimeoutError: it took longer; it has been cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await cancel_and_wait(task)
        raise
    if not task.done():
        await cancel_and_wait(task)
        raise TimeoutError(f"{what} took longer than its limit of {limit_s:g} s")
    return task.result()


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, but not for ever."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        logger.error("%r takes no notice of being cancelled and is left to itself.", task)
        task.add_done_callback(_look_away)
    else:
        _look_away(task)


def _look_away(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it; marked as seen, so that it is not reported as forgotten


async def wait_uninterrupted(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until every task is done, those too that are added meanwhile, however often the waiter is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while pending := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled

"""Helpers for asyncio tasks: run several, wait with a deadline, cancel, and require one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from agentfly.core.errors import UsageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""Seconds that an operation has to end after its cancellation. After that it is abandoned."""


async def gather_or_raise(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    The first failure cancels the others. It is raised unchanged, with its cause, and not in an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def wait_at_most(work: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
    """Wait for ``work`` for a limited time, even if it ignores its cancellation.

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
        logger.error("%r ignores its cancellation and is abandoned.", task)
        task.add_done_callback(retrieve_exception)
    else:
        retrieve_exception(task)


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marked as retrieved, so that asyncio does not report it as never retrieved


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


def require_running_loop(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Raise unless ``loop`` is the event loop that runs here.

    Args:
        loop: the loop in which the object was entered.
        what: name of the object's kind, for the message.

    Raises:
        UsageError: another loop runs, no loop runs, or ``loop`` is closed. The message says which, and what to do.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        return
    if loop.is_closed():
        raise UsageError(f"The event loop in which this {what} was entered is closed. Enter another one in this loop.")
    found = "no event loop runs in this thread" if running is None else "another event loop runs here"
    raise UsageError(
        f"This {what} belongs to the event loop in which it was entered, and {found}. Have that loop do the call, with "
        f"asyncio.run_coroutine_threadsafe (a sync tool: context.wait), or enter another {what} in this loop."
    )

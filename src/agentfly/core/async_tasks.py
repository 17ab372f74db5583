"""Helpers for asyncio: concurrent calls with one failure, and the check of an object's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from agentfly.core.errors import UsageError

T = TypeVar("T")


async def gather_or_raise(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    The first failure cancels the others. It is raised as it is, with its cause, and not in an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


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

"""The one event loop in which an object may be used."""

from __future__ import annotations

import asyncio

from agentfly.errors import UsageError


def require_own(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """See that ``loop`` is the one that runs here.

    Args:
        loop: where the object was entered.
        what: what the object is, for the message.

    Raises:
        UsageError: another one runs, or none, or it is closed; the message says which, and what to do.
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

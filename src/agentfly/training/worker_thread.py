"""Blocking work in a thread, waited for whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Run blocking work in a thread. When cancelled, tell it to stop, and wait for its end before saying so.

    Were the caller to go on at once, it would release what the thread still works on.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # asked again; the request is passed on below, when the thread has ended
        running.exception()  # the cancellation is what the caller hears of
        raise

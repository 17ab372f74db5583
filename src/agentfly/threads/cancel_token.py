"""CancelToken: how work on a thread, which nothing can stop from outside, is asked to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from agentfly.threads.pool import on_thread_to_its_end

P = ParamSpec("P")
T = TypeVar("T")


class Cancelled(Exception):
    """The work was asked to stop."""


class CancelToken:
    """Asked by work on a thread, every few milliseconds, whether to go on.

    Attributes:
        cancelled: set, on any thread, to ask the work to stop.
    """

    __slots__ = ("_deadline", "_limit_s", "cancelled")

    def __init__(self, limit_s: float | None = None) -> None:
        """Let the work go on.

        Args:
            limit_s: seconds from now after which it is to stop; None for no limit.
        """
        self.cancelled = threading.Event()
        self._limit_s = limit_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s

    def check(self) -> None:
        """Come back if the work is to go on.

        Raises:
            Cancelled: somebody asked it to stop.
            TimeoutError: its time is over.
        """
        if self.cancelled.is_set():
            raise Cancelled("it was asked to stop")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError(f"it took longer than {self._limit_s:g} s")


async def on_cancellable_thread(
    function: Callable[Concatenate[CancelToken, P], T], limit_s: float | None, *args: P.args, **kwargs: P.kwargs
) -> T:
    """What a function that may block gives. If the caller is cancelled, it is asked to stop, and its end waited for.

    Args:
        function: called with a token, which it must ask often, and then with the other arguments.
        limit_s: seconds that it may take; None for any time.
        args: further arguments.
        kwargs: further arguments.

    Raises:
        TimeoutError: it took longer.
    """
    token = CancelToken(limit_s)
    return await on_thread_to_its_end(lambda: function(token, *args, **kwargs), token.cancelled)

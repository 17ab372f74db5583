"""Ways to run blocking work on a thread: with a cancel token, or always on the same dedicated thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from agentfly.core.threads.call import ThreadCall
from agentfly.core.threads.pool import THREAD_POOL, ThreadPool, run_in_thread_to_completion

P = ParamSpec("P")
T = TypeVar("T")


class WorkCancelled(Exception):
    """The work was asked to stop."""


class CancelToken:
    """Tells work on a thread whether to continue. The work should check it every few milliseconds.

    Attributes:
        cancelled: set, on any thread, to ask the work to stop.
    """

    __slots__ = ("_deadline", "_limit_s", "cancelled")

    def __init__(self, limit_s: float | None = None) -> None:
        """Create a token that lets the work continue.

        Args:
            limit_s: seconds from now after which the work must stop; None for no limit.
        """
        self.cancelled = threading.Event()
        self._limit_s = limit_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s

    def check(self) -> None:
        """Return if the work may continue.

        Raises:
            WorkCancelled: it was asked to stop.
            TimeoutError: its time limit has passed.
        """
        if self.cancelled.is_set():
            raise WorkCancelled("it was asked to stop")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError(f"it took longer than {self._limit_s:g} s")


async def run_in_cancellable_thread(
    function: Callable[Concatenate[CancelToken, P], T], limit_s: float | None, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that may block. If the caller is cancelled, the function is asked to stop and is waited for.

    Args:
        function: called with a token, which it must check often, and the other arguments.
        limit_s: time limit in seconds; None for no limit.
        args: further arguments.
        kwargs: further arguments.

    Raises:
        TimeoutError: it took longer.
    """
    token = CancelToken(limit_s)
    return await run_in_thread_to_completion(lambda: function(token, *args, **kwargs), token.cancelled)


class DedicatedThread:
    """Makes calls one after another, in order, on one thread that is reserved for it.

    Use it for objects whose parts are bound to a thread. The thread is borrowed from a pool, from the first call to
    `close`. A hanging call delays the calls after it, but not the end of the process.

    Args:
        threads: the pool to borrow the thread from.
    """

    def __init__(self, threads: ThreadPool = THREAD_POOL) -> None:
        self._threads = threads
        self._calls: SimpleQueue[ThreadCall[Any] | None] = SimpleQueue()
        self._started = False

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a user's function on the thread, like `ThreadPool.call`."""
        call, outcome = self._threads.new_call(function, (), arguments)
        self._put(call)
        return await self._threads.result_of(call, outcome)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call a function on the thread after the earlier calls, like `ThreadPool.start`."""
        call, outcome = self._threads.new_call(function, args, kwargs)
        self._put(call)
        if (notice := getattr(outcome.get_loop(), "notice_thread", None)) is not None:
            notice(outcome)
        return outcome

    def close(self) -> None:
        """Return the thread once it has made all calls."""
        self._calls.put(None)

    def _put(self, call: ThreadCall[Any]) -> None:
        if not self._started:
            self._threads.submit(self._serve)
            self._started = True
        self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._threads.claim(call):
                call.run()
                self._threads.finish(call)
                call.publish()
            del call

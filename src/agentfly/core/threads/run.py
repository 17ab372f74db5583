"""CancelToken: how work on a thread, which nothing can stop from outside, is asked to stop.

DedicatedThread: makes all the calls of one object, whose parts may be bound to the thread they came from.
"""

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
            raise WorkCancelled("it was asked to stop")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError(f"it took longer than {self._limit_s:g} s")


async def run_in_cancellable_thread(
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
    return await run_in_thread_to_completion(lambda: function(token, *args, **kwargs), token.cancelled)


class DedicatedThread:
    """Makes calls one after another, in the order in which they came, all on one thread, which nobody else uses.

    The thread is one of the others', from the first call to `close`. A call that hangs keeps it, and what comes after
    waits; but not the end of the process.

    Args:
        threads: where the thread comes from.
    """

    def __init__(self, threads: ThreadPool = THREAD_POOL) -> None:
        self._threads = threads
        self._calls: SimpleQueue[ThreadCall[Any] | None] = SimpleQueue()
        self._started = False

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a user's function on the thread; as `ThreadPool.call`."""
        call, outcome = self._threads.new_call(function, (), arguments)
        self._put(call)
        return await self._threads.result_of(call, outcome)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have the thread call a function after what it was given before; as `ThreadPool.begin`."""
        call, outcome = self._threads.new_call(function, args, kwargs)
        self._put(call)
        if (notice := getattr(outcome.get_loop(), "notice_thread", None)) is not None:
            notice(outcome)
        return outcome

    def close(self) -> None:
        """Let the thread go once it has done what it was given."""
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

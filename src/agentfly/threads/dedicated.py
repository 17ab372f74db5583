"""DedicatedThread: makes all the calls of one object, whose parts may be bound to the thread they came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from agentfly.threads.call import ThreadCall
from agentfly.threads.pool import THREADS, Threads

P = ParamSpec("P")
T = TypeVar("T")


class DedicatedThread:
    """Makes calls one after another, in the order in which they came, all on one thread, which nobody else uses.

    The thread is one of the others', from the first call to `end`. A call that hangs keeps it, and what comes after
    waits; but not the end of the process.

    Args:
        threads: where the thread comes from.
    """

    def __init__(self, threads: Threads = THREADS) -> None:
        self._threads = threads
        self._calls: SimpleQueue[ThreadCall[Any] | None] = SimpleQueue()
        self._started = False

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a user's function on the thread; as `Threads.call`."""
        call, outcome = self._threads.new_call(function, (), arguments)
        self._put(call)
        return await self._threads.outcome(call, outcome)

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have the thread call a function after what it was given before; as `Threads.begin`."""
        call, outcome = self._threads.new_call(function, args, kwargs)
        self._put(call)
        if (notice := getattr(outcome.get_loop(), "notice_thread", None)) is not None:
            notice(outcome)
        return outcome

    def end(self) -> None:
        """Let the thread go once it has done what it was given."""
        self._calls.put(None)

    def _put(self, call: ThreadCall[Any]) -> None:
        if not self._started:
            self._threads.submit(self._serve)
            self._started = True
        self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._threads.take(call):
                call.run()
                self._threads.end(call)
                call.deliver()
            del call

"""Virtual time: asyncio code runs with sleeps and timeouts that take no time, in a repeatable order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_PATIENCE_S = 5.0
"""Real seconds for which the clock stands still at most while a thread works for the loop."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever there is nothing else to do.

    What is given to threads with `asyncio.to_thread` or ``run_in_executor``, and AgentFly's own work on threads, takes
    no time by this clock: it stands still meanwhile, unless nothing happens for `THREAD_PATIENCE_S`, as when the thread
    itself waits for a timer. Sync functions of users, and threads started in other ways, are not waited for.
    """

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._in_threads = 0
        super().__init__(_JumpingSelector(self))

    @property
    def has_thread_at_work(self) -> bool:
        """Whether a thread works for the loop."""
        return self._in_threads > 0

    def time(self) -> float:
        """Seconds since the loop was made, on its own clock."""
        return self._virtual_time

    def advance(self, seconds: float) -> None:
        """Let the clock jump."""
        self._virtual_time += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Have a thread call a function."""
        future = super().run_in_executor(executor, func, *args)
        self.notice_thread(future)
        return future

    def notice_thread(self, outcome: asyncio.Future[Any]) -> None:
        """Count a thread that works for the loop until ``outcome`` is done, as `agentfly.core.threads` reports it."""
        self._in_threads += 1
        outcome.add_done_callback(self._thread_done)

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._in_threads -= 1


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        waits = timeout > 0 and self._loop.has_thread_at_work
        ready = super().select(THREAD_PATIENCE_S if waits else 0)
        if not ready and timeout > 0:
            self._loop.advance(timeout)
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

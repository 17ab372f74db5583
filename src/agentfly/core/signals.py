"""Ctrl-C and SIGTERM: what runs is cancelled, gives everything back, and then ends as the signal says.

A program that owns its event loop, as every ``agentfly`` command and `agentfly.train` does, calls `run_until_signal` in place of
`asyncio.run`. A coroutine in the loop of somebody else, as `agentfly.run`, takes SIGTERM with `cancel_on_sigterm` as
long as it runs, and only where nobody else does: where SIGTERM would end the process at once, it ends it once all is
given back. Ctrl-C is left to `asyncio.run` there, which cancels too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process unless it does something about them. SIGHUP comes when the terminal is closed."""

FORCE_EXIT_AFTER_S = 10.0
"""Seconds after which a further signal ends what still cleans up, and leaves the rest to a later process."""

LOOP_BLOCKED_AFTER_S = 1.0
"""Seconds after which an event loop that has not noticed the first signal counts as blocked."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalHandler:
    """The handler of signals that are to end the program, which they do once.

    The first signal cancels the tasks that asked for it, or raises where there is none. Further ones change nothing,
    so that no clean-up is cut short, unless something blocks the event loop so that it does not even notice the first
    one, or `FORCE_EXIT_AFTER_S` have gone by.

    Args:
        rooted: whether what installs it sees to it that the program ends as the signal says.

    Attributes:
        received: the first signal; None before it.
    """

    def __init__(self, *, rooted: bool) -> None:
        self.rooted = rooted
        self.received: int | None = None
        self._process = os.getpid()
        self._since = 0.0
        self._noticed = True
        self._tasks: Counter[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Counter()
        self._before: dict[int, _Handler] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if os.getpid() != self._process:  # a fork of the program, which ends as if none of this were
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)
        elif self.received is None:
            self.received, self._since = number, time.monotonic()
            if self._tasks:
                self._noticed = False
                for loop, task in self._tasks:
                    loop.call_soon_threadsafe(self._cancel, task)
            else:
                raise self.exception()
        elif time.monotonic() > self._since + (FORCE_EXIT_AFTER_S if self._noticed else LOOP_BLOCKED_AFTER_S):
            raise self.exception()

    def exception(self) -> BaseException:
        """What ends the program as the first signal says."""
        if self.received in (None, signal.SIGINT):
            return KeyboardInterrupt()
        return SystemExit(128 + self.received)

    def install(self, *numbers: int) -> None:
        """Take signals that nobody else takes."""
        if not _on_main_thread():
            return
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self)

    def uninstall(self) -> None:
        """Let the signals do what they did before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Within the block the running task is what a signal cancels."""
        task = asyncio.current_task()
        assert task is not None  # only called by coroutines
        key = (asyncio.get_running_loop(), task)
        self._tasks[key] += 1
        try:
            yield
        finally:
            self._tasks[key] -= 1
            if not self._tasks[key]:
                del self._tasks[key]
            if not (self._tasks or self.rooted or self.received):
                self.uninstall()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._noticed = True
        task.cancel()


@contextmanager
def signals_end_program() -> Iterator[None]:
    """Within the block, which is a whole program, signals end it in good order, and never twice.

    Raises:
        SystemExit: after a signal, with 128 + its number; after Ctrl-C too, so that no traceback is shown.
    """
    interruption = SignalHandler(rooted=True)
    interruption.install(signal.SIGINT, *TERMINATING)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        if interruption.received is None:  # else the interpreter is on its way out, and is not to be disturbed
            interruption.uninstall()


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does. Ctrl-C, SIGTERM and SIGHUP cancel it.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once it has cleaned up.
        SystemExit: after SIGTERM or SIGHUP, with 128 + the signal's number, likewise.
    """
    current = _installed(signal.SIGINT) or _installed(signal.SIGTERM)
    interruption = current or SignalHandler(rooted=True)
    if current is None:
        interruption.install(signal.SIGINT, *TERMINATING)

    async def interruptible() -> T:
        with interruption.cancelling():
            return await main

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if interruption.received is None:
            raise
        raise interruption.exception() from None
    finally:
        if current is None:
            interruption.uninstall()


@contextmanager
def cancel_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP cancel the running task, and end the process once it has cleaned up.

    Nothing is done where somebody else takes the signal already, or off the main thread.

    Raises:
        SystemExit: a signal came.
    """
    interruption = _installed(signal.SIGTERM)
    if interruption is None:
        interruption = SignalHandler(rooted=False)
        interruption.install(*TERMINATING)
    try:
        with interruption.cancelling():
            yield
    except asyncio.CancelledError:
        if interruption.received is None or interruption.rooted:
            raise
        raise interruption.exception() from None


def should_propagate(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether what came out of a user's code is not that code's doing, and is not to be held up.

    That is the interruption of the program by a signal, and the end of a coroutine that is closed without having ended.
    Code that raises such an exception by itself has failed, as far as the two can be told apart: Ctrl-C that nobody
    here handles raises KeyboardInterrupt wherever the program is.

    Args:
        error: what came out.
        task: the task that ran the code.
    """
    if isinstance(error, GeneratorExit):
        return task is None or _running_task() is not task
    if not _on_main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):
            return False  # as in a shell's background jobs: Ctrl-C raises nothing here
        interruption = _installed(signal.SIGINT)
        return interruption is None or interruption.received is not None
    if isinstance(error, SystemExit):
        interruption = _installed(signal.SIGTERM)
        return interruption is not None and interruption.received is not None
    return False


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Within the block, which is a clean-up in bounded time, Ctrl-C waits for the end of the block, for `FORCE_EXIT_AFTER_S`.

    `asyncio.run` raises wherever the program is when Ctrl-C comes a second time, in the midst of a clean-up too.
    """
    hold = _hold()
    if hold is None:
        yield
        return
    hold.users += 1
    try:
        yield
    finally:
        hold.users -= 1
        if not hold.users and isinstance(signal.getsignal(signal.SIGINT), _DeferredSigint):
            signal.signal(signal.SIGINT, hold.handler)
            if hold.held is not None:
                hold.handler(*hold.held)


def _hold() -> _DeferredSigint | None:
    """What holds Ctrl-C back from now on; None where nothing has to, or can."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _DeferredSigint):
        return handler
    if not callable(handler) or isinstance(handler, SignalHandler) or not _on_main_thread():
        return None
    hold = _DeferredSigint(handler)
    signal.signal(signal.SIGINT, hold)
    return hold


class _DeferredSigint:
    """Keeps a signal for the handler that it stands in for."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.users = 0
        self.held: tuple[int, FrameType | None] | None = None
        self._since = time.monotonic()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._since + FORCE_EXIT_AFTER_S:
            raise KeyboardInterrupt
        self.held = (number, frame)


def _on_main_thread() -> bool:
    """Whether this is the thread that handlers of signals can be set from, and run on."""
    return threading.current_thread() is threading.main_thread()


def _installed(number: int) -> SignalHandler | None:
    """The handler of a signal if it is one of these. Kept nowhere else, because the process has one table of them."""
    handler = signal.getsignal(number)
    return handler if isinstance(handler, SignalHandler) else None

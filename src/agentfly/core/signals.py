"""Handling of Ctrl-C and SIGTERM: cancel the running work, release all resources, then end with the signal's status.

A program that owns its event loop, such as every ``agentfly`` command and `agentfly.train`, calls `run_until_signal`
instead of `asyncio.run`. A coroutine in another owner's loop, such as `agentfly.run`, uses `cancel_on_sigterm`. It
handles SIGTERM only if the program does not, so that the process ends after the release of its resources. Ctrl-C is
left to `asyncio.run` there, which also cancels.
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
"""Signals that end a process by default. SIGHUP is sent when the terminal is closed."""

FORCE_EXIT_AFTER_S = 10.0
"""Seconds after which another signal aborts the clean-up. A later process then removes the rest."""

LOOP_BLOCKED_AFTER_S = 1.0
"""Seconds after which an event loop that has not handled the first signal counts as blocked."""

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalHandler:
    """Handler of signals that end the program.

    The first signal cancels the registered tasks, or raises if there are none. Further signals are ignored, so that
    clean-up is not interrupted. They raise only if the event loop is blocked, or after `FORCE_EXIT_AFTER_S`.

    Args:
        ends_process: whether the caller that installs it ends the program with the signal's status.

    Attributes:
        received: the first signal; None before it.
    """

    def __init__(self, *, ends_process: bool) -> None:
        self.ends_process = ends_process
        self.received: int | None = None
        self._process = os.getpid()
        self._since = 0.0
        self._noticed = True
        self._tasks: Counter[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Counter()
        self._before: dict[int, _Handler] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:  # a fork of the program ends with the default behaviour
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
        """Return the exception that ends the program with the first signal's status."""
        if self.received in (None, signal.SIGINT):
            return KeyboardInterrupt()
        return SystemExit(128 + self.received)

    def install(self, *numbers: int) -> None:
        """Handle those signals that still have their default handler."""
        if not _on_main_thread():
            return
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Register the running task, so that a signal cancels it within the block."""
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
            if not (self._tasks or self.ends_process or self.received):
                self.uninstall()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._noticed = True
        task.cancel()


@contextmanager
def signals_end_program() -> Iterator[None]:
    """Let signals end the program in an orderly way. The block is the whole program.

    Raises:
        SystemExit: after a signal, with 128 + its number. Ctrl-C too, so that no traceback is shown.
    """
    interruption = SignalHandler(ends_process=True)
    interruption.install(signal.SIGINT, *TERMINATING)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        if interruption.received is None:  # otherwise the interpreter is shutting down and must not be interrupted
            interruption.uninstall()


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`. Ctrl-C, SIGTERM and SIGHUP cancel it.

    Raises:
        KeyboardInterrupt: after Ctrl-C and the coroutine's clean-up.
        SystemExit: after SIGTERM or SIGHUP and the clean-up, with 128 + the signal's number.
    """
    current = _installed(signal.SIGINT) or _installed(signal.SIGTERM)
    interruption = current or SignalHandler(ends_process=True)
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
    """Let SIGTERM and SIGHUP cancel the running task within the block, and end the process after its clean-up.

    Does nothing off the main thread, or where another handler is installed.

    Raises:
        SystemExit: a signal was received.
    """
    interruption = _installed(signal.SIGTERM)
    if interruption is None:
        interruption = SignalHandler(ends_process=False)
        interruption.install(*TERMINATING)
    try:
        with interruption.cancelling():
            yield
    except asyncio.CancelledError:
        if interruption.received is None or interruption.ends_process:
            raise
        raise interruption.exception() from None


def should_propagate(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether an exception from user code must propagate: an interrupt by a signal, or the closing of the coroutine.

    User code that raises such an exception by itself has failed. The two cannot always be distinguished: without a
    handler, Ctrl-C raises KeyboardInterrupt anywhere in the program.

    Args:
        error: the exception.
        task: the task that ran the code.
    """
    if isinstance(error, GeneratorExit):
        return task is None or _running_task() is not task
    if not _on_main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):
            return False  # Ctrl-C raises nothing, as in background jobs of a shell
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
    """Defer Ctrl-C to the end of the block, for at most `FORCE_EXIT_AFTER_S`. For clean-up in bounded time.

    Under `asyncio.run` a second Ctrl-C raises anywhere in the program, also during clean-up.
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
    """Install and return the handler that defers Ctrl-C; None where that is unnecessary or impossible."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _DeferredSigint):
        return handler
    if not callable(handler) or isinstance(handler, SignalHandler) or not _on_main_thread():
        return None
    hold = _DeferredSigint(handler)
    signal.signal(signal.SIGINT, hold)
    return hold


class _DeferredSigint:
    """Stores a signal for the handler that it replaces."""

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
    """Whether this is the main thread, where signal handlers are set and run."""
    return threading.current_thread() is threading.main_thread()


def _installed(number: int) -> SignalHandler | None:
    """Return the installed handler of a signal if it is a `SignalHandler`. The process has one table of handlers."""
    handler = signal.getsignal(number)
    return handler if isinstance(handler, SignalHandler) else None

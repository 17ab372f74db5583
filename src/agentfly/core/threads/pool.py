"""ThreadPool: reusable daemon threads for work that may block.

Starting a thread holds up the event loop until the new thread has acquired the interpreter lock. asyncio's own thread
pool is too small for users' functions, which may block for long. Calls therefore go to idle threads, and a new thread
is started only if none is idle. All threads are daemons: the end of the process does not wait for them.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.threads.call import InlineCompletionSink, LoopCompletionSink, ThreadCall

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_VARIABLE = "AGENTFLY_MAX_THREADS"
"""The environment variable for the maximum number of threads that run users' functions."""

DEFAULT_LIMIT = 4096
"""The default maximum number of threads that run users' functions."""

THREAD_IDLE_TIMEOUT_S = 30.0
"""Seconds after which an idle thread ends."""

FIRST_WARNING_AT = 16
"""The number of abandoned calls that triggers the first warning. Each doubling triggers another."""

logger = logging.getLogger(__name__)


class ThreadPool:
    """A pool of threads for calls that may block. An idle thread takes the next call; otherwise a new one is started.

    At most ``limit`` threads run users' functions (`call`); further calls wait in a queue. Two kinds of calls must not
    use up the limit:

    * A call that waits for the event loop (`not_counted_while_waiting`) does not count, because the loop may need a
      thread to serve it.
    * A call whose caller was cancelled is abandoned. Its thread continues, because threads cannot be stopped, and a new
      thread replaces it, until all ``limit`` threads run abandoned calls. Then further calls fail.

    AgentFly's own work (`start`) is not limited, because releasing resources must not wait for users' functions.

    Args:
        limit: maximum number of threads that run users' functions; by default ``$AGENTFLY_MAX_THREADS``, or
            `DEFAULT_LIMIT`.
        idle_s: seconds after which an idle thread ends.
    """

    def __init__(self, limit: int | None = None, *, idle_s: float = THREAD_IDLE_TIMEOUT_S) -> None:
        self._given_limit = limit
        self._idle_s = idle_s
        self._reset()
        reset = weakref.WeakMethod(self._reset)

        def forget_threads() -> None:
            if (forget := reset()) is not None:
                forget()

        os.register_at_fork(after_in_child=forget_threads)

    def _reset(self) -> None:
        """Start without threads, initially and in a forked process, which inherits no thread."""
        self._lock = threading.Lock()
        self._idle: list[_WorkerThread] = []
        self._queue: deque[ThreadCall[Any]] = deque()
        self._working = 0
        self._abandoned = 0
        self._abandoned_functions: Counter[str] = Counter()  # by name, of abandoned calls that have not returned
        self._warned_of_limit = False
        self._warn_at = FIRST_WARNING_AT
        self._sinks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCompletionSink] = (
            weakref.WeakKeyDictionary()
        )
        self._current = threading.local()

    @property
    def limit(self) -> int:
        """The most threads that run users' functions.

        Raises:
            ConfigError: the environment variable is not a whole number of at least 1.
        """
        if self._given_limit is None:
            text = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT))
            if not text.isdecimal() or not int(text):
                raise ConfigError(f"{LIMIT_VARIABLE}={text!r}: it must be a whole number of at least 1.")
            self._given_limit = int(text)
        return self._given_limit

    @property
    def abandoned_calls(self) -> int:
        """The number of abandoned calls of users' functions that have not returned."""
        return self._abandoned

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a user's function on a thread, with the caller's context variables, and return what it returns.

        If the caller is cancelled, the function runs on and its result is discarded.

        Raises:
            PrerequisiteError: no thread is available for it, and none will be.
            ThreadExit: it raised something other than an `Exception`.
            Exception: any exception that it raises.
        """
        call, outcome = self.new_call(function, (), arguments, counts_toward_limit=True)
        self._start_counted(call)
        return await self.result_of(call, outcome)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call a function on a thread at once; not for users' functions. Cancelling the future does not stop it.

        Raises:
            PrerequisiteError: no thread can be started.
        """
        call, outcome = self.new_call(function, args, kwargs)
        call.started = True
        self._assign(call)
        if (notice := getattr(outcome.get_loop(), "notice_thread", None)) is not None:
            notice(outcome)
        return outcome

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Like `start`, for callers that have no event loop or block it.

        Raises:
            PrerequisiteError: no thread can be started.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        call = ThreadCall(_DIRECT, outcome, function, args, kwargs)
        call.started = True
        self._assign(call)
        return outcome

    @contextmanager
    def not_counted_while_waiting(self) -> Iterator[None]:
        """Do not count the running thread within the block, in which it waits for an event loop."""
        call: ThreadCall[Any] | None = getattr(self._current, "call", None)
        if call is None or not call.counts_toward_limit:
            yield
            return
        with self._lock:
            if call.counted:
                self._uncount(call)
            following = self._next_queued()
        self._assign_counted(following)
        try:
            yield
        finally:
            with self._lock:
                if not call.abandoned:
                    self._count(call)

    # --- for other callers of these threads -------------------------------------------------------------------------

    def new_call(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        counts_toward_limit: bool = False,
    ) -> tuple[ThreadCall[T], asyncio.Future[T]]:
        """A call requested by the running event loop, and the future of its result."""
        loop = asyncio.get_running_loop()
        sink = self._sinks.get(loop)
        if sink is None:
            sink = self._sinks[loop] = LoopCompletionSink(loop)
        outcome: asyncio.Future[T] = loop.create_future()
        return ThreadCall(sink, outcome, function, args, kwargs, counts_toward_limit=counts_toward_limit), outcome

    async def result_of(self, call: ThreadCall[T], outcome: asyncio.Future[T]) -> T:
        """Wait for the result of a call, which is abandoned if the caller is cancelled."""
        try:
            return await outcome
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def claim(self, call: ThreadCall[Any]) -> bool:
        """Record that a thread is about to make a queued call. Returns False if no one waits for the call any more."""
        with self._lock:
            call.started = not call.abandoned
            return call.started

    def finish(self, call: ThreadCall[Any]) -> None:
        """Record that a dedicated thread has made a call."""
        with self._lock:
            self._uncount(call)

    # --- how a call gets a thread -------------------------------------------------------------------------------------

    def _start_counted(self, call: ThreadCall[Any]) -> None:
        limit = self.limit
        with self._lock:
            full = self._working + self._abandoned >= limit
            hopeless = full and not self._working
            if not full:
                self._count(call)
            elif not hopeless:
                self._queue.append(call)
        if hopeless:
            raise self._refusal(f"all {limit} threads that there may be are taken")
        if full:
            self._warn_of_limit(f"All {limit} threads that there may be are at sync functions ({LIMIT_VARIABLE})")
        else:
            self._assign_counted(call)

    def _assign_counted(self, call: ThreadCall[Any] | None) -> None:
        """Assign a call that already counts. If no thread can be started, it waits for a working one."""
        if call is None:
            return
        try:
            self._assign(call)
        except PrerequisiteError as error:
            with self._lock:
                self._uncount(call)
                call.started = False
                waits = bool(self._working)
                if waits:
                    self._queue.appendleft(call)
            if waits:
                self._warn_of_limit(str(error.__cause__))
            else:
                call.reject(error)

    def _assign(self, call: ThreadCall[Any]) -> None:
        """Give a call to an idle thread, or to a new one.

        Raises:
            PrerequisiteError: no thread can be started.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None:
            worker.wake(call)
            return
        try:
            _thread.start_new_thread(self._worker_main, (_WorkerThread(call),))  # threading's would be waited for
        except RuntimeError as error:
            raise self._refusal(f"the system refuses to start another one ({error})") from error

    def _worker_main(self, worker: _WorkerThread) -> None:
        """Make calls, one after another, until the thread has been idle for a while. Runs on the thread."""
        thread, current = threading.current_thread(), self._current
        if (trace := threading.gettrace()) is not None:  # of debuggers and coverage tools
            sys.settrace(trace)
        call = worker.call
        while call is not None:
            worker.call = None
            thread.name = f"agentfly {call.name}"
            current.call = call
            if not call.abandoned:
                call.run()
            current.call = None
            with self._lock:
                self._uncount(call)
                following = self._next_queued()
                if following is None:
                    self._idle.append(worker)  # before the result is published, because that may lead to the next call
            call.publish()
            del call
            call = self._next_call(worker) if following is None else following

    def _next_call(self, worker: _WorkerThread) -> ThreadCall[Any] | None:
        """Wait for the next call of an idle thread; None if it should end. Runs on the thread."""
        while not worker.sleep(self._idle_s):
            with self._lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                    return None
        return worker.call

    def _next_queued(self) -> ThreadCall[Any] | None:
        """Take the next queued call that may be made, and count it. The lock is held."""
        while self._queue and self._working + self._abandoned < self.limit:
            call = self._queue.popleft()
            if not call.abandoned:
                self._count(call)
                return call
        return None

    # --- counting; the lock is held -----------------------------------------------------------------------------------

    def _count(self, call: ThreadCall[Any]) -> None:
        call.started = call.counted = True
        self._working += 1

    def _uncount(self, call: ThreadCall[Any]) -> None:
        if call.counted:
            call.counted = False
            self._working -= 1
        elif call.counted_as_abandoned:
            call.counted_as_abandoned = False
            self._abandoned -= 1
            self._abandoned_functions[call.name] -= 1

    def _count_abandoned(self, call: ThreadCall[Any]) -> None:
        self._uncount(call)
        call.counted_as_abandoned = True
        self._abandoned += 1
        self._abandoned_functions[call.name] += 1

    def _abandon(self, call: ThreadCall[Any]) -> None:
        """Note that no one waits for a call any more."""
        stranded: list[ThreadCall[Any]] = []
        with self._lock:
            call.abandoned = True
            if call.ended or not call.started:
                return
            self._count_abandoned(call)
            following = self._next_queued()
            if following is None and not self._working:
                stranded = [*self._queue]
                self._queue.clear()
            abandoned = self._abandoned
            warn = abandoned >= self._warn_at
            if warn:
                self._warn_at = 2 * abandoned
        self._assign_counted(following)
        for queued in stranded:
            queued.reject(self._refusal(f"all {self.limit} threads that there may be are taken"))
        if warn:
            logger.warning(
                "%d threads are at sync functions that were given up and have not returned: %s. No thread can be "
                "stopped from outside; each takes memory, and processor time unless it just waits. Give what they wait "
                "for a time limit of its own, or make them async.",
                abandoned,
                self._names(),
            )

    # --- messages -----------------------------------------------------------------------------------------------------

    def _names(self) -> str:
        return ", ".join(f"{name} ({count})" for name, count in self._abandoned_functions.most_common(5) if count > 0)

    def _refusal(self, found: str) -> PrerequisiteError:
        hang = f"; {self._abandoned} are at functions that were given up and do not return: {self._names()}"
        return PrerequisiteError(
            f"There is no thread for a call: {found}{hang if self._abandoned else ''}. Raise the limit (ulimit -u, the "
            f"container's limit on pids, {LIMIT_VARIABLE}), run fewer rollouts at a time, or make sync functions async."
        )

    def _warn_of_limit(self, found: str) -> None:
        if not self._warned_of_limit:
            self._warned_of_limit = True
            logger.warning(
                "%s, so sync functions wait for one another from now on. Raise the limit, run fewer rollouts at a "
                "time, or make the functions async. This is not told again.",
                found,
            )


class _WorkerThread:
    """One thread of the pool, which others wake with the next call."""

    __slots__ = ("_woken", "call")

    def __init__(self, call: ThreadCall[Any]) -> None:
        self.call: ThreadCall[Any] | None = call
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self, call: ThreadCall[Any]) -> None:
        """Wake the thread with its next call."""
        self.call = call
        self._woken.release()

    def sleep(self, seconds: float) -> bool:
        """Wait to be woken. Returns False after a timeout. Runs on the thread."""
        return self._woken.acquire(timeout=seconds)


_DIRECT = InlineCompletionSink()

THREAD_POOL = ThreadPool()
"""The thread pool of this process, shared by all its event loops."""


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may block and return its result; for users' functions use `ThreadPool.call`.

    If the caller is cancelled, the function runs on and its result is discarded.

    Raises:
        PrerequisiteError: no thread can be started.
    """
    return await THREAD_POOL.start(function, *args, **kwargs)


async def run_in_thread_to_completion(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Run blocking work and return its result. If the caller is cancelled, ask the work to stop and wait for its end.

    A caller that continued at once would release objects that the thread still uses.
    """
    running = THREAD_POOL.start(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # cancelled again; raised below, when the thread has finished
        running.exception()  # the caller gets the cancellation instead
        raise

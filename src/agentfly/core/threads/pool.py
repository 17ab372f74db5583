"""Threads: the threads for what may block, which are used again.

Starting a thread holds up the event loop until the new thread has had the interpreter's lock, and asyncio's own threads
are too few for functions of users, which may hold them for long. So calls go to idle threads, and a new one is started
where there is none. All are daemons: the end of the process waits for none of them.
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
"""The environment variable that says how many threads may be at users' functions."""

DEFAULT_LIMIT = 4096
"""How many threads may be at users' functions if nothing else is said."""

THREAD_IDLE_TIMEOUT_S = 30.0
"""Seconds after which a thread without work ends."""

FIRST_WARNING_AT = 16
"""From so many abandoned calls on the user is told, and again whenever their number has doubled."""

logger = logging.getLogger(__name__)


class ThreadPool:
    """Threads for calls that may block. An idle one takes the next call; where there is none, one is started.

    Calls of users' functions (`call`) are bounded: beyond ``limit`` threads at such functions the next calls wait for
    their turn. Two kinds of calls must not take the threads from others:

    * A call that waits for the event loop (`not_counted_while_waiting`) does not count, because what it waits for may need a thread.
    * A call whose caller has given up is abandoned: its thread goes on, since no thread can be stopped, and another one
      takes its place, until all ``limit`` threads are at abandoned calls. Then further calls fail.

    AgentFly's own work (`start`) is not bounded, because what gives resources back must not wait for users' functions.

    Args:
        limit: the most threads at users' functions; by default ``$AGENTFLY_MAX_THREADS``, or `DEFAULT_LIMIT`.
        idle_s: seconds after which a thread without work ends.
    """

    def __init__(self, limit: int | None = None, *, idle_s: float = THREAD_IDLE_TIMEOUT_S) -> None:
        self._given_limit = limit
        self._idle_s = idle_s
        self._reset()
        begin_empty = weakref.WeakMethod(self._reset)

        def forget_threads() -> None:
            if (forget := begin_empty()) is not None:
                forget()

        os.register_at_fork(after_in_child=forget_threads)

    def _reset(self) -> None:
        """Have no thread, as at first and in a process that was forked: no thread has come along."""
        self._lock = threading.Lock()
        self._idle: list[_WorkerThread] = []
        self._queue: deque[ThreadCall[Any]] = deque()
        self._working = 0
        self._lost = 0
        self._abandoned_functions: Counter[str] = Counter()  # the functions of lost calls
        self._told_of_limit = False
        self._warn_at = FIRST_WARNING_AT
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCompletionSink] = (
            weakref.WeakKeyDictionary()
        )
        self._here = threading.local()

    @property
    def limit(self) -> int:
        """The most threads at users' functions.

        Raises:
            ConfigError: the environment variable that says so is no number above 0.
        """
        if self._given_limit is None:
            said = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT))
            if not said.isdecimal() or not int(said):
                raise ConfigError(f"{LIMIT_VARIABLE}={said!r}: it must be a whole number of at least 1.")
            self._given_limit = int(said)
        return self._given_limit

    @property
    def abandoned_calls(self) -> int:
        """How many calls of users' functions have not returned though nobody waits for them any more."""
        return self._lost

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a user's function on a thread, with the caller's context variables, and return what it returns.

        When the caller is cancelled, the function goes on, and nobody hears of it.

        Raises:
            PrerequisiteError: there is no thread for it, and there will be none.
            ThreadExit: it raised something that is no `Exception`.
            Exception: what it raises.
        """
        call, outcome = self.new_call(function, (), arguments, bounded=True)
        self._start_counted(call)
        return await self.result_of(call, outcome)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have a thread call a function at once; not for users' functions. Cancelling the future does not stop it.

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
        """The same for those who have no event loop, or block it.

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
        """Within the block the running thread waits for an event loop, and so for what other calls do."""
        call: ThreadCall[Any] | None = getattr(self._here, "call", None)
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

    # --- for what makes calls on these threads ------------------------------------------------------------------------

    def new_call(
        self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bounded: bool = False
    ) -> tuple[ThreadCall[T], asyncio.Future[T]]:
        """A call that the running event loop asks for, and what will come of it."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopCompletionSink(loop)
        outcome: asyncio.Future[T] = loop.create_future()
        return ThreadCall(mailbox, outcome, function, args, kwargs, bounded=bounded), outcome

    async def result_of(self, call: ThreadCall[T], outcome: asyncio.Future[T]) -> T:
        """What comes of a call, which is abandoned if the caller is cancelled."""
        try:
            return await outcome
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def claim(self, call: ThreadCall[Any]) -> bool:
        """A thread is about to make a call that waited for it; False if nobody waits for the call any more."""
        with self._lock:
            call.started = not call.abandoned
            return call.started

    def finish(self, call: ThreadCall[Any]) -> None:
        """A thread has made a call, and that thread is no other's."""
        with self._lock:
            self._uncount(call)

    # --- how a call gets a thread -------------------------------------------------------------------------------------

    def _start_counted(self, call: ThreadCall[Any]) -> None:
        limit = self.limit
        with self._lock:
            full = self._working + self._lost >= limit
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
        """Have a call made that counts already. Where no thread can be started, it waits for one that works."""
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
        """Make calls, one after another, until there is none for a while. Runs on the thread."""
        thread, here = threading.current_thread(), self._here
        if (trace := threading.gettrace()) is not None:  # of debuggers, and of who counts the lines that are tested
            sys.settrace(trace)
        call = worker.call
        while call is not None:
            worker.call = None
            thread.name = f"agentfly {call.name}"
            here.call = call
            if not call.abandoned:
                call.run()
            here.call = None
            with self._lock:
                self._uncount(call)
                following = self._next_queued()
                if following is None:
                    self._idle.append(worker)  # before the result is told, because what comes of it may be a call
            call.publish()
            del call
            call = self._next_call(worker) if following is None else following

    def _next_call(self, worker: _WorkerThread) -> ThreadCall[Any] | None:
        """The next call that an idle thread is given; None if it is to end. Runs on the thread."""
        while not worker.sleep(self._idle_s):
            with self._lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                    return None
        return worker.call

    def _next_queued(self) -> ThreadCall[Any] | None:
        """The next call that may be made, counted. The lock is held."""
        while self._queue and self._working + self._lost < self.limit:
            call = self._queue.popleft()
            if not call.abandoned:
                self._count(call)
                return call
        return None

    # --- who counts; the lock is held ---------------------------------------------------------------------------------

    def _count(self, call: ThreadCall[Any]) -> None:
        call.started = call.counted = True
        self._working += 1

    def _uncount(self, call: ThreadCall[Any]) -> None:
        if call.counted:
            call.counted = False
            self._working -= 1
        elif call.counted_as_abandoned:
            call.counted_as_abandoned = False
            self._lost -= 1
            self._abandoned_functions[call.name] -= 1

    def _count_abandoned(self, call: ThreadCall[Any]) -> None:
        self._uncount(call)
        call.counted_as_abandoned = True
        self._lost += 1
        self._abandoned_functions[call.name] += 1

    def _abandon(self, call: ThreadCall[Any]) -> None:
        """Nobody waits for a call any more."""
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
            lost = self._lost
            tell = lost >= self._warn_at
            if tell:
                self._warn_at = 2 * lost
        self._assign_counted(following)
        for one in stranded:
            one.reject(self._refusal(f"all {self.limit} threads that there may be are taken"))
        if tell:
            logger.warning(
                "%d threads are at sync functions that were given up and have not returned: %s. No thread can be "
                "stopped from outside; each takes memory, and processor time unless it just waits. Give what they wait "
                "for a time limit of its own, or make them async.",
                lost,
                self._names(),
            )

    # --- what is told -------------------------------------------------------------------------------------------------

    def _names(self) -> str:
        return ", ".join(f"{name} ({count})" for name, count in self._abandoned_functions.most_common(5) if count > 0)

    def _refusal(self, found: str) -> PrerequisiteError:
        hang = f"; {self._lost} are at functions that were given up and do not return: {self._names()}"
        return PrerequisiteError(
            f"There is no thread for a call: {found}{hang if self._lost else ''}. Raise the limit (ulimit -u, the "
            f"container's limit on pids, {LIMIT_VARIABLE}), run fewer rollouts at a time, or make sync functions async."
        )

    def _warn_of_limit(self, found: str) -> None:
        if not self._told_of_limit:
            self._told_of_limit = True
            logger.warning(
                "%s, so sync functions wait for one another from now on. Raise the limit, run fewer rollouts at a "
                "time, or make the functions async. This is not told again.",
                found,
            )


class _WorkerThread:
    """One thread, as far as others wake it."""

    __slots__ = ("_woken", "call")

    def __init__(self, call: ThreadCall[Any]) -> None:
        self.call: ThreadCall[Any] | None = call
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self, call: ThreadCall[Any]) -> None:
        """Give it the next call."""
        self.call = call
        self._woken.release()

    def sleep(self, seconds: float) -> bool:
        """Wait to be woken; False if that takes too long. Runs on the thread."""
        return self._woken.acquire(timeout=seconds)


_DIRECT = InlineCompletionSink()

THREAD_POOL = ThreadPool()
"""The threads of this process, which all its event loops share."""


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function that may block gives; not for users' functions, which `ThreadPool.call` bounds.

    If the caller is cancelled, the function goes on, and nobody hears of it.

    Raises:
        PrerequisiteError: no thread can be started.
    """
    return await THREAD_POOL.start(function, *args, **kwargs)


async def run_in_thread_to_completion(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What blocking work gives. When the caller is cancelled, the work is told to stop, and its end is waited for.

    Were the caller to go on at once, it would release what the thread still works on.
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
                continue  # asked again; the request is passed on below, when the thread has ended
        running.exception()  # the cancellation is what the caller hears of
        raise

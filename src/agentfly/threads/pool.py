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

from agentfly.errors import ConfigError, PrerequisiteError
from agentfly.threads.call import DirectMailbox, LoopMailbox, ThreadCall

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_VARIABLE = "AGENTFLY_MAX_THREADS"
"""The environment variable that says how many threads may be at users' functions."""

DEFAULT_LIMIT = 4096
"""How many threads may be at users' functions if nothing else is said."""

IDLE_S = 30.0
"""Seconds after which a thread without work ends."""

FIRST_TOLD = 16
"""From so many abandoned calls on the user is told, and again whenever their number has doubled."""

logger = logging.getLogger(__name__)


class Threads:
    """Threads for calls that may block. An idle one takes the next call; where there is none, one is started.

    Calls of users' functions (`call`) are bounded: beyond ``limit`` threads at such functions the next calls wait for
    their turn. Two kinds of calls must not take the threads from others:

    * A call that waits for the event loop (`waiting`) does not count, because what it waits for may need a thread.
    * A call whose caller has given up is abandoned: its thread goes on, since no thread can be stopped, and another one
      takes its place, until all ``limit`` threads are at abandoned calls. Then further calls fail.

    AgentFly's own work (`begin`) is not bounded, because what gives resources back must not wait for users' functions.

    Args:
        limit: the most threads at users' functions; by default ``$AGENTFLY_MAX_THREADS``, or `DEFAULT_LIMIT`.
        idle_s: seconds after which a thread without work ends.
    """

    def __init__(self, limit: int | None = None, *, idle_s: float = IDLE_S) -> None:
        self._given_limit = limit
        self._idle_s = idle_s
        self._begin_empty()
        begin_empty = weakref.WeakMethod(self._begin_empty)

        def forget_threads() -> None:
            if (forget := begin_empty()) is not None:
                forget()

        os.register_at_fork(after_in_child=forget_threads)

    def _begin_empty(self) -> None:
        """Have no thread, as at first and in a process that was forked: no thread has come along."""
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._queue: deque[ThreadCall[Any]] = deque()
        self._working = 0
        self._lost = 0
        self._culprits: Counter[str] = Counter()  # the functions of lost calls
        self._told_of_limit = False
        self._tell_at = FIRST_TOLD
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox] = weakref.WeakKeyDictionary()
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
    def lost(self) -> int:
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
        self._begin_bounded(call)
        return await self.outcome(call, outcome)

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have a thread call a function at once; not for users' functions. Cancelling the future does not stop it.

        Raises:
            PrerequisiteError: no thread can be started.
        """
        call, outcome = self.new_call(function, args, kwargs)
        call.begun = True
        self._hand(call)
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
        call.begun = True
        self._hand(call)
        return outcome

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block the running thread waits for an event loop, and so for what other calls do."""
        call: ThreadCall[Any] | None = getattr(self._here, "call", None)
        if call is None or not call.bounded:
            yield
            return
        with self._lock:
            if call.counted:
                self._uncount(call)
            following = self._next_queued()
        self._hand_counted(following)
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
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        outcome: asyncio.Future[T] = loop.create_future()
        return ThreadCall(mailbox, outcome, function, args, kwargs, bounded=bounded), outcome

    async def outcome(self, call: ThreadCall[T], outcome: asyncio.Future[T]) -> T:
        """What comes of a call, which is abandoned if the caller is cancelled."""
        try:
            return await outcome
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def take(self, call: ThreadCall[Any]) -> bool:
        """A thread is about to make a call that waited for it; False if nobody waits for the call any more."""
        with self._lock:
            call.begun = not call.abandoned
            return call.begun

    def end(self, call: ThreadCall[Any]) -> None:
        """A thread has made a call, and that thread is no other's."""
        with self._lock:
            self._uncount(call)

    # --- how a call gets a thread -------------------------------------------------------------------------------------

    def _begin_bounded(self, call: ThreadCall[Any]) -> None:
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
            self._tell_of_limit(f"All {limit} threads that there may be are at sync functions ({LIMIT_VARIABLE})")
        else:
            self._hand_counted(call)

    def _hand_counted(self, call: ThreadCall[Any] | None) -> None:
        """Have a call made that counts already. Where no thread can be started, it waits for one that works."""
        if call is None:
            return
        try:
            self._hand(call)
        except PrerequisiteError as error:
            with self._lock:
                self._uncount(call)
                call.begun = False
                waits = bool(self._working)
                if waits:
                    self._queue.appendleft(call)
            if waits:
                self._tell_of_limit(str(error.__cause__))
            else:
                call.refuse(error)

    def _hand(self, call: ThreadCall[Any]) -> None:
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
            _thread.start_new_thread(self._work, (_Worker(call),))  # threading's would be waited for
        except RuntimeError as error:
            raise self._refusal(f"the system refuses to start another one ({error})") from error

    def _work(self, worker: _Worker) -> None:
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
            call.deliver()
            del call
            call = self._waited_for(worker) if following is None else following

    def _waited_for(self, worker: _Worker) -> ThreadCall[Any] | None:
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
        call.begun = call.counted = True
        self._working += 1

    def _uncount(self, call: ThreadCall[Any]) -> None:
        if call.counted:
            call.counted = False
            self._working -= 1
        elif call.lost:
            call.lost = False
            self._lost -= 1
            self._culprits[call.name] -= 1

    def _lose(self, call: ThreadCall[Any]) -> None:
        self._uncount(call)
        call.lost = True
        self._lost += 1
        self._culprits[call.name] += 1

    def _abandon(self, call: ThreadCall[Any]) -> None:
        """Nobody waits for a call any more."""
        stranded: list[ThreadCall[Any]] = []
        with self._lock:
            call.abandoned = True
            if call.ended or not call.begun:
                return
            self._lose(call)
            following = self._next_queued()
            if following is None and not self._working:
                stranded = [*self._queue]
                self._queue.clear()
            lost = self._lost
            tell = lost >= self._tell_at
            if tell:
                self._tell_at = 2 * lost
        self._hand_counted(following)
        for one in stranded:
            one.refuse(self._refusal(f"all {self.limit} threads that there may be are taken"))
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
        return ", ".join(f"{name} ({count})" for name, count in self._culprits.most_common(5) if count > 0)

    def _refusal(self, found: str) -> PrerequisiteError:
        hang = f"; {self._lost} are at functions that were given up and do not return: {self._names()}"
        return PrerequisiteError(
            f"There is no thread for a call: {found}{hang if self._lost else ''}. Raise the limit (ulimit -u, the "
            f"container's limit on pids, {LIMIT_VARIABLE}), run fewer rollouts at a time, or make sync functions async."
        )

    def _tell_of_limit(self, found: str) -> None:
        if not self._told_of_limit:
            self._told_of_limit = True
            logger.warning(
                "%s, so sync functions wait for one another from now on. Raise the limit, run fewer rollouts at a "
                "time, or make the functions async. This is not told again.",
                found,
            )


class _Worker:
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


_DIRECT = DirectMailbox()

THREADS = Threads()
"""The threads of this process, which all its event loops share."""


async def on_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function that may block gives; not for users' functions, which `Threads.call` bounds.

    If the caller is cancelled, the function goes on, and nobody hears of it.

    Raises:
        PrerequisiteError: no thread can be started.
    """
    return await THREADS.begin(function, *args, **kwargs)


async def on_thread_to_its_end(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What blocking work gives. When the caller is cancelled, the work is told to stop, and its end is waited for.

    Were the caller to go on at once, it would release what the thread still works on.
    """
    running = THREADS.begin(work)
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

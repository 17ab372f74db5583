"""The processes of a bubblewrap sandbox's shell, and the pipe on which they report."""

from __future__ import annotations

import asyncio
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.sandbox_processes import PidNamespace
from agentfly.resources.containers.shell import FloodLimiter
from agentfly.resources.process.procfs import children

MAX_BYTES_PER_TURN = 1024
"""Bytes of reports read in one turn of the event loop. Our scripts write less."""
MAX_LOOKUPS_PER_TURN = 4
"""Reports of a new process that are handled in one turn of the event loop. Each needs a lookup."""

_PAUSE_S = 0.005
_PROCESS_REPORTS = b"efh"
_LOOKUP = 1024  # bytes that such a report costs
_LEAST, _PER_SECOND, _PER_REQUEST = 64 * 1024, 16 * 1024, 16 * 1024  # bytes; traps of the session may print there too
_LONGEST = 256
_REPORT = re.compile(rb"([bdefh]) ([\d ]{1,64})$")  # a trap of the session may have printed before it

Report = Callable[[bytes, list[int]], None]


class ReportReader:
    """The host's end of the pipe on which a shell reports, one line per report.

    Any process of the sandbox can write there. So each turn of the event loop takes a bounded number of bytes and
    reports. If far more arrives than a shell writes, `flooded` is called once and reading ends.
    """

    def __init__(
        self, descriptor: int, *, report: Report, ended: Callable[[], None], flooded: Callable[[], None]
    ) -> None:
        """Start to read.

        Args:
            descriptor: the non-blocking pipe. The caller closes it after `close`.
            report: called with the word and the numbers of each report.
            ended: called at EOF.
            flooded: called if far more arrives than a shell writes.
        """
        self._descriptor = descriptor
        self._report, self._ended, self._flooded = report, ended, flooded
        self._loop = asyncio.get_running_loop()
        self._flood_limiter = FloodLimiter(_LEAST, per_second=_PER_SECOND, per_request=_PER_REQUEST)
        self._rest = b""  # of an incomplete line
        self._lines: deque[bytes] = deque()  # read and not dispatched yet
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._loop.add_reader(descriptor, self._readable)

    def add_request(self) -> None:
        """Account for a request, which the shell will answer."""
        self._flood_limiter.add_request()

    def poll(self) -> None:
        """Read reports that have already arrived, without waiting for the event loop."""
        if self._pause is None and not self._closed and self._poll.poll(0):
            self._readable()

    def close(self) -> None:
        """Stop reading."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._descriptor, MAX_BYTES_PER_TURN)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            self._ended()
            return
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()[-_LONGEST:]
        self._lines.extend(lines)
        if self._over_limit(len(chunk)):
            return
        self._dispatch()
        if not self._closed and (self._lines or len(chunk) == MAX_BYTES_PER_TURN):
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._dispatch()
        if self._closed:
            return
        if self._lines:
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)
        else:
            self._pause = None
            self._loop.add_reader(self._descriptor, self._readable)

    def _dispatch(self) -> None:
        """Dispatch as many reports as one turn of the event loop allows."""
        lookups = 0
        while self._lines and not self._closed:
            found = _REPORT.search(self._lines[0])
            if found is not None and found[1] in _PROCESS_REPORTS:
                lookups += 1
                if lookups > MAX_LOOKUPS_PER_TURN or self._over_limit(_LOOKUP):
                    return
            self._lines.popleft()
            if found is not None:
                self._report(found[1], [int(number) for number in found[2].split()])

    def _over_limit(self, amount: int) -> bool:
        if self._flood_limiter.spend(amount):
            return False
        self.close()
        self._flooded()
        return True


class ChildList:
    """The children of a process with one thread, as every shell has.

    The kernel lists them in a file. It is opened once, which makes each lookup cheap.
    """

    def __init__(self, pid: int) -> None:
        """Attach to the process `pid`. If it is gone, it has no children."""
        try:
            self._descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1
        self._text = b""
        self._pids: frozenset[int] = frozenset()

    def pids(self) -> frozenset[int]:
        """Their process ids on the host."""
        try:
            text = os.pread(self._descriptor, 65536, 0)
        except OSError:  # it is gone
            text = b""
        if text != self._text:
            self._text, self._pids = text, frozenset(map(int, text.split()))
        return self._pids

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_INLINE_CHILDREN = 16  # with more children, lookups run on a thread
_LOOKUP_ATTEMPTS = 3
_PAUSE_FACTOR = 3  # the pause after a lookup, as a multiple of its duration


@dataclass(frozen=True)
class _PendingReports:
    """Reported process ids, as seen inside the sandbox, that are not looked up yet.

    Args:
        session: process id of the new session, and the number of the command that was sent to the old session but never
            started (0: none).
        spawner: process id of the new spawner.
    """

    session: tuple[int, int] | None = None
    spawner: int | None = None


@dataclass(frozen=True)
class _LookupResult:
    """The result of a lookup, as process ids of the host.

    Args:
        session: the reported session; None if it has exited.
        spawner: the reported spawner; None if it has exited.
        old_spawner_alive: whether the previous spawner still runs. The report is then forged and ignored.
        new_process_pids: process 1's children, as process ids inside, if a spawner was reported.
    """

    session: int | None
    spawner: int | None
    old_spawner_alive: bool
    new_process_pids: set[int]


class ShellProcesses:
    """The session, and the spawner, which starts commands in processes of their own.

    A process reports its id inside the sandbox. Finding it on the host means inspecting each child of process 1. There
    may be thousands, and a hostile process may report any number of times. So only the last report of each kind is
    looked up. With many children, a thread does it, for a limited share of its time.

    Attributes:
        session: the host's process id of the session; None while there is none.
        spawner: the host's process id of the spawner; None while there is none.
    """

    def __init__(
        self,
        processes: PidNamespace,
        launcher: Launcher,
        *,
        session_started: Callable[[int], None],
        spawner_started: Callable[[set[int]], None],
    ) -> None:
        """Start with neither a session nor a spawner.

        Args:
            processes: the processes of the sandbox.
            launcher: provides the thread.
            session_started: called when a session is ready, with the number of the command that was sent to the
                previous session and that it did not start (0: none).
            spawner_started: called when a spawner has replaced one that exited, with process 1's children as process
                ids inside.
        """
        self.session: int | None = None
        self.spawner: int | None = None
        self._processes, self._launcher = processes, launcher
        self._session_started, self._spawner_started = session_started, spawner_started
        self._below_first = ChildList(processes.init_pid)
        self._below_session: ChildList | None = None
        self._pending = _PendingReports()
        self._lookup: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pids(self) -> set[int]:
        """The host's process ids of the session and the spawner."""
        return {pid for pid in (self.session, self.spawner) if pid is not None}

    def children(self, *, of_session: bool) -> frozenset[int]:
        """Return the children of process 1, and those of the session if requested."""
        found = self._below_first.pids()
        return found | self._below_session.pids() if of_session and self._below_session is not None else found

    @property
    def session_lives(self) -> bool:
        """Whether the session is alive."""
        return self.session is not None and self.session in self._below_first.pids()

    def session_reported(self, inside: int, asked: int) -> None:
        """Handle the report of a new session."""
        self._pending = _PendingReports((inside, asked), self._pending.spawner)
        self._resolve()

    def spawner_reported(self, inside: int) -> None:
        """Handle the report of a new spawner."""
        self._pending = _PendingReports(self._pending.session, inside)
        self._resolve()

    def session_ended(self) -> None:
        """Handle the exit of the session, and of one that was just reported."""
        self.session = None
        self._pending = _PendingReports(None, self._pending.spawner)
        if self._below_session is not None:
            self._below_session.close()
            self._below_session = None

    def close(self) -> None:
        """Stop lookups."""
        self._closed = True
        if self._lookup is not None:
            self._lookup.cancel()
        self._below_first.close()
        if self._below_session is not None:
            self._below_session.close()

    def _resolve(self) -> None:
        """Look up the last reports: at once if there are few candidates, else on another thread."""
        if self._lookup is not None:
            return  # that lookup goes on with this report
        if len(self._below_first.pids()) <= _INLINE_CHILDREN:
            pending = self._pending
            self._apply(pending, self._look_up(pending))
        else:
            self._lookup = asyncio.create_task(self._resolve_on_thread())

    async def _resolve_on_thread(self) -> None:
        try:
            while not self._closed and (pending := self._pending) != _PendingReports():
                began = time.monotonic()
                self._apply(pending, await self._launcher.run_blocking(self._look_up, pending))
                await asyncio.sleep(_PAUSE_FACTOR * (time.monotonic() - began))  # all sandboxes share the threads
        finally:
            self._lookup = None

    def _look_up(self, pending: _PendingReports) -> _LookupResult:
        session = spawner = None
        lived, new_process_pids = False, set[int]()
        if pending.session is not None:
            session = self._child(pending.session[0])
        if pending.spawner is not None:
            first = self._processes.init_pid
            lived = self.spawner is not None and self.spawner in children(first)
            if not lived:
                spawner = self._child(pending.spawner)
                new_process_pids = self._processes.inner_pids(first)
        return _LookupResult(session, spawner, lived, new_process_pids)

    def _child(self, inside: int) -> int | None:
        """Return the host's process id of a child of process 1.

        It tries several times, because a listing may omit a process while others exit.
        """
        tries = (self._processes.host_pid(inside, self._processes.init_pid) for _ in range(_LOOKUP_ATTEMPTS))
        return next((pid for pid in tries if pid is not None), None)

    def _apply(self, pending: _PendingReports, found: _LookupResult) -> None:
        """Apply the result of a lookup, unless a newer report has arrived."""
        if self._closed:
            return
        if pending.spawner is not None and pending.spawner == self._pending.spawner:
            self._pending = _PendingReports(self._pending.session)
            if not found.old_spawner_alive:
                self.spawner = found.spawner
                self._spawner_started(found.new_process_pids)
        if pending.session is not None and pending.session is self._pending.session:
            self._pending = _PendingReports(None, self._pending.spawner)
            if found.session is not None:  # otherwise it has exited since, which will be reported
                self.session = found.session
                self._below_session = ChildList(found.session)
                self._session_started(pending.session[1])

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
from agentfly.resources.containers.sandbox_processes import ChildList, PidNamespace
from agentfly.resources.containers.shell import FloodLimiter
from agentfly.resources.process.procfs import children

MAX_BYTES_PER_TURN = 1024
"""Bytes that are read before others get their turn. What fills it is no shell of ours."""
MAX_LOOKUPS_PER_TURN = 4
"""Reports of a process, which is then looked for, that are heeded before others get their turn."""

_PAUSE_S = 0.005
_OF_A_PROCESS = b"efh"
_LOOKUP = 1024  # what such a report uses up, in bytes
_LEAST, _PER_SECOND, _PER_REQUEST = 64 * 1024, 16 * 1024, 16 * 1024  # bytes; traps of the session may print there, too
_LONGEST = 256
_REPORT = re.compile(rb"([bdefh]) ([\d ]{1,64})$")  # what precedes it on the line, a trap of the session has printed

Report = Callable[[bytes, list[int]], None]


class ReportReader:
    """The host's end of the pipe on which a shell reports, one line per report.

    Any process of the sandbox can write there. So each turn of the event loop takes a bounded number of bytes and
    reports.
    If much more arrives than a shell writes, `flooded` is called once and reading ends.
    """

    def __init__(
        self, descriptor: int, *, report: Report, ended: Callable[[], None], flooded: Callable[[], None]
    ) -> None:
        """Begin to read.

        Args:
            descriptor: the non-blocking pipe. The caller closes it after `close`.
            report: called with the word and the numbers of each report.
            ended: called at the end of the pipe.
            flooded: called when far more was written than a shell writes.
        """
        self._descriptor = descriptor
        self._report, self._ended, self._flooded = report, ended, flooded
        self._loop = asyncio.get_running_loop()
        self._allowance = FloodLimiter(_LEAST, per_second=_PER_SECOND, per_request=_PER_REQUEST)
        self._rest = b""  # of a line
        self._lines: deque[bytes] = deque()  # read and not dispatched yet
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._loop.add_reader(descriptor, self._readable)

    def add_request(self) -> None:
        """Account for a request, which the shell will report on."""
        self._allowance.add_request()

    def look(self) -> None:
        """Read what is there now, without waiting for the event loop."""
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
        """Pass on as many reports as one turn of the event loop allows."""
        lookups = 0
        while self._lines and not self._closed:
            found = _REPORT.search(self._lines[0])
            if found is not None and found[1] in _OF_A_PROCESS:
                lookups += 1
                if lookups > MAX_LOOKUPS_PER_TURN or self._over_limit(_LOOKUP):
                    return
            self._lines.popleft()
            if found is not None:
                self._report(found[1], [int(number) for number in found[2].split()])

    def _over_limit(self, amount: int) -> bool:
        if self._allowance.spend(amount):
            return False
        self.close()
        self._flooded()
        return True


_FEW = 16  # children among which one is looked for at once; among more, on another thread
_LOOKS = 3
_REST = 3  # times as long as a look took, until the next one


@dataclass(frozen=True)
class _PendingReports:
    """Reported process ids (inside the sandbox) that are not looked up yet.

    Args:
        session: process id of the new session, and the number of the command that was sent to the old session but never
            started (0: none).
        starter: process id of the new starter of commands in processes of their own.
    """

    session: tuple[int, int] | None = None
    starter: int | None = None


@dataclass(frozen=True)
class _LookupResult:
    """The result of a lookup, as process ids of the host.

    Args:
        session: the reported session; None if it has exited.
        starter: the reported starter; None if it has exited.
        starter_lived: whether the previous starter still runs. The report is then ignored.
        alone: the ids inside of process 1's children, after a starter was reported.
    """

    session: int | None
    starter: int | None
    starter_lived: bool
    alone: set[int]


class ShellProcesses:
    """The session, and the starter of commands in processes of their own.

    A process reports its id inside the sandbox. Finding it on the host means inspecting each child of process 1. There
    may
    be thousands, and a hostile process may report any number of times. So only the last report of each kind is looked
    up.
    With many children, another thread does it, for a small share of its time.

    Attributes:
        session: the host's process id; None while there is none.
        starter: the same.
    """

    def __init__(
        self,
        processes: PidNamespace,
        launcher: Launcher,
        *,
        session_began: Callable[[int], None],
        starter_began: Callable[[set[int]], None],
    ) -> None:
        """Begin with none.

        Args:
            processes: those of the sandbox.
            launcher: provides the other thread.
            session_began: called when a session is ready, with the number of the command that the previous session was
                sent and did not start.
            starter_began: called when a starter has replaced one that ended, with the ids inside of process 1's
                children.
        """
        self.session: int | None = None
        self.starter: int | None = None
        self._processes, self._launcher = processes, launcher
        self._session_began, self._starter_began = session_began, starter_began
        self._below_first = ChildList(processes.init_pid)
        self._below_session: ChildList | None = None
        self._said = _PendingReports()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pids(self) -> set[int]:
        """The host's process ids of those that run."""
        return {pid for pid in (self.session, self.starter) if pid is not None}

    def children(self, *, of_session: bool) -> frozenset[int]:
        """The children of process 1, and those of the session if requested."""
        found = self._below_first.pids()
        return found | self._below_session.pids() if of_session and self._below_session is not None else found

    @property
    def session_lives(self) -> bool:
        """Whether the session runs."""
        return self.session is not None and self.session in self._below_first.pids()

    def session_reported(self, inside: int, asked: int) -> None:
        """A session has reported that it is ready."""
        self._said = _PendingReports((inside, asked), self._said.starter)
        self._resolve()

    def starter_reported(self, inside: int) -> None:
        """A starter has reported that it is ready."""
        self._said = _PendingReports(self._said.session, inside)
        self._resolve()

    def session_ended(self) -> None:
        """The session has exited, and so has one that was just reported."""
        self.session = None
        self._said = _PendingReports(None, self._said.starter)
        if self._below_session is not None:
            self._below_session.close()
            self._below_session = None

    def close(self) -> None:
        """Stop lookups."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._below_first.close()
        if self._below_session is not None:
            self._below_session.close()

    def _resolve(self) -> None:
        """Look up the last reports: at once if there are few candidates, else on another thread."""
        if self._looking is not None:
            return  # who looks will go on to this one
        if len(self._below_first.pids()) <= _FEW:
            said = self._said
            self._apply(said, self._look_up(said))
        else:
            self._looking = asyncio.create_task(self._resolve_on_thread())

    async def _resolve_on_thread(self) -> None:
        try:
            while not self._closed and (said := self._said) != _PendingReports():
                began = time.monotonic()
                self._apply(said, await self._launcher.run_blocking(self._look_up, said))
                await asyncio.sleep(_REST * (time.monotonic() - began))  # the thread is for all sandboxes
        finally:
            self._looking = None

    def _look_up(self, said: _PendingReports) -> _LookupResult:
        session = starter = None
        lived, alone = False, set[int]()
        if said.session is not None:
            session = self._child(said.session[0])
        if said.starter is not None:
            first = self._processes.init_pid
            lived = self.starter is not None and self.starter in children(first)
            if not lived:
                starter = self._child(said.starter)
                alone = self._processes.inner_pids(first)
        return _LookupResult(session, starter, lived, alone)

    def _child(self, inside: int) -> int | None:
        """The host's process id of a child of process 1. It looks more than once: a listing may omit one while others
        exit.
        """
        tries = (self._processes.host_pid(inside, self._processes.init_pid) for _ in range(_LOOKS))
        return next((pid for pid in tries if pid is not None), None)

    def _apply(self, said: _PendingReports, seen: _LookupResult) -> None:
        """Apply a lookup's result, unless a newer report has arrived."""
        if self._closed:
            return
        if said.starter is not None and said.starter == self._said.starter:
            self._said = _PendingReports(self._said.session)
            if not seen.starter_lived:
                self.starter = seen.starter
                self._starter_began(seen.alone)
        if said.session is not None and said.session is self._said.session:
            self._said = _PendingReports(None, self._said.starter)
            if seen.session is not None:  # else it has ended since, which will be reported
                self.session = seen.session
                self._below_session = ChildList(seen.session)
                self._session_began(said.session[1])

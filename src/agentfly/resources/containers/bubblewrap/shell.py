"""Shell: the commands of a sandbox, one after the other in a session that lasts, or each in a process of its own.

The session is a bash that runs each command in itself, so that its directory and variables last. Each command has pipes
of its own for its output: what a process that it left behind prints later goes nowhere, and holds nothing open. The end
of a command is reported on a pipe of the session's, so nobody waits for the end of its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from pathlib import Path

from agentfly.errors import ResourceDied, ResourceError
from agentfly.resources.containers.bubblewrap.bubble import Bubble
from agentfly.resources.containers.bubblewrap.exchange import Exchange
from agentfly.resources.containers.bubblewrap.processes import children_of_shell
from agentfly.resources.containers.bubblewrap.running import Running
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.processes import children

_KEEP_GRACE_S = 0.5  # for a session to keep its variables once its command has been killed
_RESTART_GRACE_S = 5.0
_SWEEPS = 10
_LOOKS = 3
_REPORTS_AT_ONCE = 1024  # bytes; what fills it is no shell of ours, and must not keep the event loop busy
_REPORTS_PAUSE_S = 0.005


class Shell:
    """The host's side of a sandbox's shell.

    What arrives from inside is read, and never trusted: the processes of a sandbox are one user's, so any of them can
    write what the shell would write. A forged report can make up the end of a command, or its exit code; it cannot
    reach beyond the sandbox, nor hold the event loop up.
    """

    def __init__(self, bubble: Bubble) -> None:
        """Attach to a sandbox that has been started."""
        assert bubble.launched is not None
        assert bubble.processes is not None
        self._bubble = bubble
        self._launcher = bubble.launcher
        self._exchange = Exchange(bubble.exchange, bubble.launcher)
        self._processes = bubble.processes
        self._requests, self._reports = bubble.launched.requests, bubble.launched.reports
        self._starts = self._exchange.open_starts()
        self._loop = asyncio.get_running_loop()
        self._names = itertools.count(1)
        self._running: dict[str, Running] = {}
        self._kills: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # the session takes one command at a time
        self._buffer = b""
        self._pause: asyncio.TimerHandle | None = None
        self._session: int | None = None  # the host's process ids
        self._starter: int | None = None
        self._ready = asyncio.Event()  # there is a session
        self._served = False  # the session has finished a command since it began
        self._directory = ""  # where the next command must go first, because its session could not keep it
        self._died_of: str | None = None
        self._loop.add_reader(self._reports, self._read_reports)

    async def ready(self) -> None:
        """Wait for the session to take commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        await self._ready.wait()
        self._check()

    async def run(self, command: Command, timeout: float) -> Outcome:
        """Run a command and wait for it, for at most `timeout` seconds; then it is killed with all that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            ResourceError: the host has no room for the command's input, or too many files open.
        """
        if command.own_process:
            return await self._run(command, timeout)
        async with self._turn:
            return await self._run(command, timeout)

    def close(self) -> None:
        """Let go of the sandbox, which is about to end or has."""
        self._die("it was released or reset")
        self._exchange.close()
        if self._starts >= 0:
            os.close(self._starts)
            self._starts = -1

    def stop_clocks(self) -> None:
        """The sandbox is about to be frozen: what commands may take does not run out meanwhile."""
        for running in self._running.values():
            running.stop_clock()

    def start_clocks(self) -> None:
        """The sandbox goes on."""
        for running in self._running.values():
            if not running.waiter.done():
                running.start_clock()

    @property
    def keepers(self) -> set[int]:
        """The host's ids of the processes that the shell itself consists of, beside process 1."""
        return {pid for pid in (self._session, self._starter) if pid is not None}

    async def _run(self, command: Command, timeout: float) -> Outcome:
        if self._kills:  # the end of a command whose caller has left
            await asyncio.wait(self._kills)
        self._check()
        name = str(next(self._names))
        try:
            where, pipes = self._exchange.pipes()
            running = self._running[name] = Running(name, command, pipes)
        except OSError as error:
            raise ResourceError(f"The output of a command could not be connected: {error}") from error
        try:
            directory = self._directory if not command.own_process else ""
            source = await self._exchange.place(name, command, directory)
            self._check()
            if directory:
                self._directory = ""
            self._send(running, f"{name} {source} {where}\n".encode())
            exit_code = await self._end_of(running, timeout)
        finally:
            self._running.pop(name)
            self._exchange.finish(pipes)
            self._exchange.remove(name)
        self._check()
        return running.outcome(exit_code)

    async def _end_of(self, running: Running, timeout: float) -> int | None:
        """Wait for the end of a command; None if it had to be killed because it ran out of time."""
        running.start_clock(timeout)
        try:
            exit_code = await running.waiter
            if exit_code is None:
                await asyncio.shield(self._begin_kill(running))
        except asyncio.CancelledError:
            if not running.ended.is_set():
                self._begin_kill(running)
            raise
        finally:
            running.stop_clock()
        return exit_code

    def _send(self, running: Running, line: bytes) -> None:
        running.before.update(children_of_shell(self._processes.first))
        if self._session is not None and not running.own_process:
            running.before.update(children_of_shell(self._session))
        try:
            os.write(self._starts if running.own_process else self._requests, line)
        except OSError as error:
            self._die(f"its shell takes no more commands ({error})")

    def _check(self) -> None:
        if self._died_of is not None:
            raise ResourceDied(f"The sandbox {self._bubble.name} is gone: {self._died_of}.")

    # --- reports ----------------------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        try:
            chunk = os.read(self._reports, _REPORTS_AT_ONCE)
        except BlockingIOError:
            return
        if not chunk:
            self._die(self._bubble.cause_of_death())
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._buffer = self._buffer[-256:]
        for line in lines:
            with contextlib.suppress(ValueError):  # not one of ours
                word, *numbers = line.split()
                self._report(word.decode(), [int(number) for number in numbers])
        if len(chunk) == _REPORTS_AT_ONCE and not self.dead:
            self._loop.remove_reader(self._reports)
            self._pause = self._loop.call_later(
                _REPORTS_PAUSE_S, self._loop.add_reader, self._reports, self._read_reports
            )

    def _report(self, word: str, numbers: list[int]) -> None:
        match word, numbers:
            case "b", [name, process]:
                if running := self._running.get(str(name)):
                    running.begun, running.process = True, process
            case "d", [name, exit_code] if exit_code in range(256):
                if running := self._running.get(str(name)):
                    self._served = self._served or not running.own_process
                    running.finish(exit_code)
            case "h", [inside] if self._session is None:  # nobody waits for another
                self._session_began(inside)
            case "f", [inside] if self._starter is None or not self._lives(self._starter):
                self._starter_began(inside)
            case "e", [exit_code, kept] if self._session is None or not self._lives(self._session):
                self._session_ended(exit_code, bool(kept))

    def _lives(self, keeper: int) -> bool:
        return keeper in children_of_shell(self._processes.first)

    def _child(self, inside: int) -> int | None:
        """The host's id of a child of process 1. Looked for more than once: while others end, one may be left out."""
        tries = (self._processes.find(inside, self._processes.first) for _ in range(_LOOKS))
        return next((pid for pid in tries if pid is not None), None)

    def _session_began(self, inside: int) -> None:
        self._session = self._child(inside)
        if self._session is not None:  # else it has ended since, which will be reported
            self._served = False
            self._ready.set()

    def _starter_began(self, inside: int) -> None:
        first = self._processes.first
        self._starter = self._child(inside)
        for running in self._running.values():  # those of a starter before, which may have been killed with it
            if running.process and self._processes.find(running.process, first) is None:
                running.finish(137)

    def _session_ended(self, exit_code: int, kept: bool) -> None:
        self._ready.clear()
        self._session = None
        for running in self._running.values():
            if running.begun and not running.own_process and not running.ended.is_set():
                if not kept:
                    where = self._directory or self._bubble.spec.workdir
                    running.lost = f"the shell was started anew in {where}; its variables and functions are lost"
                running.finish(exit_code)

    @property
    def dead(self) -> bool:
        """Whether the sandbox is gone."""
        return self._died_of is not None

    def _die(self, cause: str) -> None:
        if self.dead:
            return
        self._died_of = cause
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._reports)
        self._ready.set()
        for running in self._running.values():
            running.finish(137)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(self, running: Running) -> asyncio.Task[None]:
        kill = self._kill_process(running) if running.own_process else self._kill_in_session(running)
        task = asyncio.create_task(kill)
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _kill_in_session(self, running: Running) -> None:
        """Kill what the command started, and make the session give up the command, keeping its variables if it can."""
        session = self._session
        if session is None:
            await self._restarted(_RESTART_GRACE_S)
            return
        keep = running.begun and self._served  # a session that never finished anything may be one that cannot
        self._ready.clear()
        if keep:
            await self._launcher.aside(self._sweep, running, session, signal.SIGTERM)
            if await self._restarted(_KEEP_GRACE_S):
                return
        self._directory = await self._launcher.aside(self._directory_of, session)
        await self._launcher.aside(self._sweep, running, session, signal.SIGKILL)
        if not await self._restarted(_RESTART_GRACE_S):
            self._bubble.kill()

    async def _kill_process(self, running: Running) -> None:
        """Kill a command that has a process of its own."""
        await self._launcher.aside(self._sweep, running, None, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), _KEEP_GRACE_S)
        if not running.begun and self._session is not None and self._starter not in children(self._processes.first):
            self._processes.signal(self._session, signal.SIGKILL)  # what follows a session brings the starter back
        running.finish(137)

    async def _restarted(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ready.wait(), patience_s)
        except TimeoutError:
            return False
        return True

    def _sweep(self, running: Running, session: int | None, number: signal.Signals) -> None:
        """Kill all that a command started, those too that left its process tree; then signal the session, if given.

        What left the tree of another command that runs at the same time cannot be told from it, and goes too.
        """
        first, starter = self._processes.first, self._starter
        parent: int | None = session
        if session is not None:
            self._processes.signal(session, signal.SIGSTOP)  # it must not go on to the command's next line
        elif running.process and starter is not None:
            parent = self._processes.find(running.process, starter)
        spared = running.before | {pid for pid in (self._session, starter) if pid is not None}
        for _ in range(_SWEEPS):
            roots = set(children(parent)) if parent is not None else set()
            roots = (roots | set(children(first))) - spared
            if not roots:
                break
            self._processes.kill_trees(roots)
            spared |= roots
        if session is not None:
            self._processes.signal(session, number)
            self._processes.signal(session, signal.SIGCONT)

    def _directory_of(self, session: int) -> str:
        try:
            return str(Path(f"/proc/{session}/cwd").readlink()).removesuffix(" (deleted)")
        except OSError:
            return ""

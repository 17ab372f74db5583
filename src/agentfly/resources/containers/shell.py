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
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import ResourceDied
from agentfly.resources.containers.output import OutputPipes
from agentfly.resources.containers.processes import children, children_of_shell
from agentfly.resources.containers.result import BoundedOutput
from agentfly.resources.containers.sandbox import Sandbox
from agentfly.resources.containers.spec import INSIDE

_KEEP_GRACE_S = 0.5  # for a session to keep its variables once its command has been killed
_RESTART_GRACE_S = 5.0
_SWEEPS = 10


@dataclass(frozen=True)
class Request:
    """What to run, and how.

    Args:
        command: bash source, of any number of lines.
        own_process: whether to run it in a process of its own, which neither sees nor changes the session.
        cwd: the directory for this command alone.
        env: variables for this command alone.
        stdin: what it can read; None means nothing.
        max_output: bytes kept of each of its two outputs.
    """

    command: bytes
    own_process: bool
    cwd: str | None
    env: Mapping[str, str]
    stdin: bytes | None
    max_output: int


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Args:
        exit_code: as the shell says it.
        stdout: its output.
        stderr: its error output.
        timed_out: whether it was killed because it ran out of time.
        lost: what the session lost because of it; empty if nothing.
    """

    exit_code: int
    stdout: BoundedOutput
    stderr: BoundedOutput
    timed_out: bool
    lost: str


class _Running:
    """A command on its way."""

    def __init__(self, name: str, request: Request, pipes: OutputPipes, before: set[int]) -> None:
        self.name = name
        self.own_process = request.own_process
        self.before = before  # processes that were there already, which its end must not touch
        self.begun = False
        self.process = 0  # its process id inside, if it has one of its own
        self.lost = ""
        self.ended = asyncio.Event()
        self.waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # None: out of time
        self.pipes = pipes
        self.stdout, self.stderr = pipes.begin(request.max_output)

    def finish(self, exit_code: int) -> None:
        self.ended.set()
        if not self.waiter.done():
            self.waiter.set_result(exit_code)

    def expire(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)


class Shell:
    """The host's side of a sandbox's shell. What arrives from inside is read, and never trusted."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Attach to a sandbox that has been started."""
        assert sandbox.launched is not None
        assert sandbox.processes is not None
        self._sandbox = sandbox
        self._launcher = sandbox.launcher
        self._exchange = str(sandbox.exchange)
        self._processes = sandbox.processes
        self._requests, self._reports = sandbox.launched.requests, sandbox.launched.reports
        self._starts = os.open(f"{self._exchange}/starts", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._names = itertools.count(1)
        self._running: dict[str, _Running] = {}
        self._pipes: dict[int, OutputPipes] = {}
        self._kills: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # the session takes one command at a time
        self._buffer = b""
        self._session: int | None = None  # the host's process ids
        self._starter: int | None = None
        self._ready = asyncio.Event()  # there is a session
        self._served = False  # the session has finished a command since it began
        self._directory = ""  # where the next command must go first, because its session could not keep it
        self.dead = False
        self._loop.add_reader(self._reports, self._read_reports)

    async def ready(self) -> None:
        """Wait for the session to take commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        await self._ready.wait()
        self._check()

    async def run(self, request: Request, timeout: float) -> Outcome:
        """Run a command and wait for it, for at most `timeout` seconds; then it is killed with all that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did.
        """
        if request.own_process:
            return await self._run(request, timeout)
        async with self._turn:
            return await self._run(request, timeout)

    def close(self) -> None:
        """Let go of the sandbox, which is about to end or has."""
        self._die()
        for pipes in self._pipes.values():
            pipes.close()
        self._pipes.clear()
        if self._starts >= 0:
            os.close(self._starts)
            self._starts = -1

    async def _run(self, request: Request, timeout: float) -> Outcome:
        if self._kills:  # the end of a command whose caller has left
            await asyncio.wait(self._kills)
        self._check()
        running = await self._send(request)
        timer = self._loop.call_later(timeout, running.expire)
        try:
            exit_code = await running.waiter
            if exit_code is None:
                await asyncio.shield(self._begin_kill(running))
        except asyncio.CancelledError:
            if not running.ended.is_set():
                self._begin_kill(running)
            raise
        finally:
            timer.cancel()
            self._forget(running, request)
        self._check()
        return Outcome(
            124 if exit_code is None else exit_code, running.stdout, running.stderr, exit_code is None, running.lost
        )

    def _check(self) -> None:
        if self.dead:
            raise ResourceDied(
                f"The sandbox {self._sandbox.scratch.name} is gone: its first process was killed, or it was released."
            )

    # --- a command's way in and out ---------------------------------------------------------------------------------

    async def _send(self, request: Request) -> _Running:
        name = str(next(self._names))
        before = set(children_of_shell(self._processes.first))
        if self._session is not None and not request.own_process:
            before.update(children_of_shell(self._session))
        source = "/dev/null"
        if request.stdin is not None:
            source = f"{INSIDE}/{name}.in"
            await self._launcher.aside(self._write, f"{name}.in", request.stdin)
        self._write_script(name, request)
        number, pipes = self._free_pipes()
        running = self._running[name] = _Running(name, request, pipes, before)
        line = f"{name} {source} {INSIDE}/{number}\n".encode()
        try:
            os.write(self._starts if request.own_process else self._requests, line)
        except OSError:
            self._die()
        return running

    def _free_pipes(self) -> tuple[int, OutputPipes]:
        for number, pipes in self._pipes.items():
            if pipes.free:
                return number, pipes
        number = len(self._pipes)
        pipes = self._pipes[number] = OutputPipes(f"{self._exchange}/{number}", self._launcher.uid)
        return number, pipes

    def _write_script(self, name: str, request: Request) -> None:
        script = request.command
        if request.cwd is not None or request.env:
            self._write(f"{name}.cmd", script)
            steps = [] if request.cwd is None else [f"cd -- {shlex.quote(request.cwd)} || exit"]
            steps += [f"export {key}={shlex.quote(value)}" for key, value in request.env.items()]
            script = f"( {'; '.join(steps)}; . {INSIDE}/{name}.cmd )".encode()
        if self._directory and not request.own_process:
            script = f"cd -- {shlex.quote(self._directory)} 2>/dev/null; ".encode() + script
            self._directory = ""
        self._write(f"{name}.sh", script)

    def _write(self, name: str, content: bytes) -> None:
        path = f"{self._exchange}/{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if self._launcher.uid is not None:
                os.fchown(descriptor, self._launcher.uid, self._launcher.uid)
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def _forget(self, running: _Running, request: Request) -> None:
        """Let go of a command. Its script goes too: a request that was never read must not run later."""
        running.pipes.finish()
        self._running.pop(running.name, None)
        suffixes = (
            ["sh"] + ["in"] * (request.stdin is not None) + ["cmd"] * (request.cwd is not None or bool(request.env))
        )
        for suffix in suffixes:
            Path(f"{self._exchange}/{running.name}.{suffix}").unlink(missing_ok=True)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        try:
            chunk = os.read(self._reports, 4096)
        except BlockingIOError:
            return
        if not chunk:
            self._die()
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        self._buffer = self._buffer[-256:]
        for line in lines:
            with contextlib.suppress(ValueError):  # not one of ours
                word, *numbers = line.split()
                self._report(word.decode(), [int(number) for number in numbers])

    def _report(self, word: str, numbers: list[int]) -> None:
        match word, numbers:
            case "b", [name, process]:
                if running := self._running.get(str(name)):
                    running.begun, running.process = True, process
            case "d", [name, exit_code]:
                if running := self._running.get(str(name)):
                    self._served = self._served or not running.own_process
                    running.finish(exit_code)
            case "h", [inside]:
                self._session = self._processes.find(inside, self._processes.first)
                self._served = False
                self._ready.set()
            case "f", [inside]:
                self._starter_began(inside)
            case "e", [exit_code, kept]:
                self._session_ended(exit_code, bool(kept))

    def _starter_began(self, inside: int) -> None:
        first = self._processes.first
        self._starter = self._processes.find(inside, first)
        for running in self._running.values():  # those of a starter before, which may have been killed with it
            if running.process and self._processes.find(running.process, first) is None:
                running.finish(137)

    def _session_ended(self, exit_code: int, kept: bool) -> None:
        self._ready.clear()
        self._session = None
        for running in self._running.values():
            if running.begun and not running.own_process and not running.ended.is_set():
                if not kept:
                    where = self._directory or self._sandbox.spec.workdir
                    running.lost = f"the shell was started anew in {where}; its variables and functions are lost"
                running.finish(exit_code)

    def _die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._reports)
        self._ready.set()
        for running in self._running.values():
            running.finish(137)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(self, running: _Running) -> asyncio.Task[None]:
        kill = self._kill_process(running) if running.own_process else self._kill_in_session(running)
        task = asyncio.create_task(kill)
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _kill_in_session(self, running: _Running) -> None:
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
            self._sandbox.kill()

    async def _kill_process(self, running: _Running) -> None:
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

    def _sweep(self, running: _Running, session: int | None, number: signal.Signals) -> None:
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

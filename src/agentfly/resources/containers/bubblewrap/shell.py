"""PipeShell: the shell of a bubblewrap sandbox, with a persistent session and commands in separate processes.

The session is a bash that runs each command in itself, so its directory and variables persist. It keeps its output
pipes until a command leaves a process behind that holds them too. The next command then gets new pipes, and later
output of that process is discarded. Each command in a separate process has its own pipes. The end of a command is
reported on another pipe, so the shell never waits for EOF.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

from agentfly.core.errors import ResourceDied, ResourceError, SandboxEnded, SandboxOutOfMemory
from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess
from agentfly.resources.containers.bubblewrap.shell_io import PipeCommand, ShellDirectory
from agentfly.resources.containers.bubblewrap.shell_processes import ReportReader, ShellProcesses
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.shell import flooded_error
from agentfly.resources.process.procfs import children

_KEEP_GRACE_S = 0.5  # for a session to save its variables after a kill
_RESTART_GRACE_S = 5.0
_KILL_ROUNDS = 10
_STOP_POLLS, _STOP_POLL_S = 100, 0.001
_MAX_NUMBER = 10**7  # words of the session have seven digits


class PipeShell:
    """The host's side of a sandbox's shell.

    Data from inside is never trusted. All processes of a sandbox run as one user, so any of them can write to the
    shell's pipes. A forged report can fake the end of a command or its exit code. It can neither affect anything
    outside the sandbox nor block the event loop. A sandbox whose processes flood the shell's pipes is stopped.

    Attributes:
        own_doing: the error of every call, once the sandbox was stopped for what its own processes did.
    """

    def __init__(self, process: BubblewrapProcess) -> None:
        """Attach to a sandbox that has been started."""
        assert process.launched is not None
        assert process.pid_namespace is not None
        self._process = process
        self._launcher = process.launcher
        self._shell_directory = ShellDirectory(process.shell_directory, process.launcher)
        self._processes = process.pid_namespace
        self._requests = process.launched.requests
        self._spawn_pipe = self._shell_directory.open_spawn_pipe()
        self._numbers = itertools.count(1)
        self._running: dict[int, PipeCommand] = {}
        self._kills: set[asyncio.Task[None]] = set()
        self._session_lock = asyncio.Lock()  # the session takes one command at a time
        self._thawed = asyncio.Event()  # set unless the sandbox is frozen
        self._thawed.set()
        self._shell_processes = ShellProcesses(
            self._processes,
            process.launcher,
            session_started=self._session_started,
            spawner_started=self._spawner_started,
        )
        self._known_pids: frozenset[int] = (
            frozenset()
        )  # children of process 1 and of the session before its last command
        self._ready = asyncio.Event()  # set while there is a session
        self._session_works = False  # whether this session has finished a command
        self._end_of_session = (0, False)  # exit code of the last session, and whether its variables were saved
        self._unconfirmed: PipeCommand | None = None  # sent to the last session, which may not have started it
        self._next_directory = ""  # where the next command must start, because its session did not save it
        self._exit_cause: str | None = None
        self.own_doing: SandboxEnded | None = None
        self._reports = ReportReader(
            process.launched.reports,
            report=self._report,
            ended=self._ended,
            flooded=self._flood,
        )
        self._connected: tuple[int, int] | None = None  # the numbers of the session's pipes and of its input
        self._send(b"g%07d" % 1)

    async def ready(self) -> None:
        """Wait for the session to take commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        await self._ready.wait()
        self.check()

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command. After `timeout` seconds, kill it with all processes that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            SandboxEnded: the sandbox was stopped for what its processes did.
            ResourceError: the host has no room for the command's input, or too many files open.
        """
        if command.new_process:
            return await self._run(command, timeout)
        async with self._session_lock:
            return await self._run(command, timeout)

    def close(self) -> None:
        """Detach from the sandbox, which is about to end or has ended."""
        self._die("it was released or reset")
        self._shell_directory.close()
        self._shell_processes.close()
        if self._spawn_pipe >= 0:
            os.close(self._spawn_pipe)
            self._spawn_pipe = -1

    async def pause(self) -> None:
        """Prepare for a freeze: wait for pending kills, and stop the clocks of running commands.

        Killing a command needs processes inside, so no kill starts before `resume`.
        """
        while self._kills:
            await asyncio.wait(self._kills)
        if not self.dead:
            self._thawed.clear()
        for running in self._running.values():
            running.time.pause()

    def resume(self) -> None:
        """Restart the clocks after a thaw."""
        self._thawed.set()
        for running in self._running.values():
            running.time.resume()

    @property
    def shell_pids(self) -> set[int]:
        """The host's process ids of the shell itself, without process 1."""
        return self._shell_processes.pids

    async def _run(self, command: Command, timeout: float) -> CommandOutcome:
        if self._kills:  # commands whose caller was cancelled
            await asyncio.wait(self._kills)
        self.check()
        name = next(self._numbers)
        directory = self._next_directory if not command.new_process else ""
        try:
            await self._shell_directory.write_command(name, command, directory)
            self.check()
            if directory:
                self._next_directory = ""
            running = self._begin(name, command)
            try:
                exit_code = await self._end_of(running, timeout)
            finally:
                if running.exit_code is not None or not running.new_process:  # otherwise it is being killed
                    self._running.pop(name, None)
                self._shell_directory.finish_output(running.pipes)
        finally:
            self._shell_directory.remove_command(name)
        self.check()
        return running.outcome(exit_code)

    def _begin(self, name: int, command: Command) -> PipeCommand:
        """Request the start of a command whose script and input are written."""
        before = self._shell_processes.children(of_session=not command.new_process)
        try:
            if command.new_process:
                number, pipes = self._shell_directory.new_pipes()
            else:
                # a process that still holds the session's pipes was started by the last command, or descends from such
                # a process
                shared = before != self._known_pids and bool(before - self._known_pids - self.shell_pids)
                number, pipes = self._shell_directory.session_pipes(fresh=shared)
                self._known_pids = before
            running = PipeCommand(name, command, pipes, before, frozen=not self._thawed.is_set())
        except OSError as error:
            raise ResourceError(f"The output of a command could not be connected: {error}") from error
        self._running[name] = running
        running.connections = (number, name if command.stdin is not None else 0)
        self._request(running)
        return running

    async def _end_of(self, running: PipeCommand, timeout: float) -> int | None:
        """Wait for the end of a command. Return None if it was killed at its time limit."""
        self._reports.poll()  # it may have ended already
        try:
            exit_code = await running.wait(timeout)
            if exit_code is None:
                await asyncio.shield(self._begin_kill(running))
        except asyncio.CancelledError:
            if running.exit_code is None:
                self._begin_kill(running)
            raise
        return exit_code

    def _request(self, running: PipeCommand) -> None:
        """Send the request to start a command."""
        self._reports.add_request()
        pipes, given = running.connections
        if running.new_process:
            # a spawner that is being killed may still read one byte: the empty line is for it
            self._send(b"\n%d %d %d\n" % (running.number, pipes, given), self._spawn_pipe)
        elif self._connected == running.connections:
            self._send(b"%08d" % running.number)
        else:
            self._connected = running.connections
            self._send(b"c%07di%07d%08d" % (pipes, given, running.number))

    def _send(self, words: bytes, pipe: int | None = None) -> None:
        try:
            os.write(self._requests if pipe is None else pipe, words)
        except BlockingIOError:  # our requests are read one by one, so another process filled the pipe
            self._flood()
        except OSError as error:
            self._die(f"its shell takes no more commands ({error})")

    def check(self) -> None:
        """Check that the sandbox takes commands.

        Raises:
            ResourceDied: the sandbox ended.
            SandboxEnded: the sandbox was stopped for what its processes did.
        """
        if self.own_doing is not None:
            raise type(self.own_doing)(*self.own_doing.args)
        if self._exit_cause is not None:
            raise ResourceDied(f"The sandbox {self._process.name} is gone: {self._exit_cause}.")

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(self, word: bytes, numbers: list[int]) -> None:
        match word, numbers:
            case b"d", [name, exit_code] if exit_code in range(256):
                if running := self._running.get(name):
                    self._session_works = self._session_works or not running.new_process
                    running.finish(exit_code)
            case b"b", [name, process]:
                if running := self._running.get(name):
                    running.started, running.process = True, process
            case b"h", [inside, asked] if self._shell_processes.session is None:  # otherwise it is forged
                self._shell_processes.session_reported(inside, asked)
            case b"f", [inside]:
                self._shell_processes.spawner_reported(inside)
            case b"e", [exit_code, kept, number] if exit_code in range(256) and number < _MAX_NUMBER:
                if not self._shell_processes.session_lives:
                    self._session_ended(exit_code, bool(kept), number)

    def _spawner_started(self, present: set[int]) -> None:
        """Finish the commands that were killed with the previous spawner."""
        for running in self._running.values():
            if running.process and running.process not in present:
                running.finish(137)

    def _session_started(self, asked: int) -> None:
        """Handle a new session. The previous one exited without starting the command `asked`."""
        self._session_works = False
        self._ready.set()
        running, self._unconfirmed = self._unconfirmed, None
        if running is None or running.exit_code is not None:
            return
        if running.number == asked:
            if self._running.get(asked) is running and not running.expired:
                self._request_again(running)
            return
        exit_code, kept = self._end_of_session
        if not kept:
            where = self._next_directory or self._process.spec.workdir
            running.note = f"the shell was restarted in {where}; its variables and functions are lost"
        running.finish(exit_code)

    def _request_again(self, running: PipeCommand) -> None:
        try:
            running.pipes.restart()
        except OSError:
            running.finish(137)
        else:
            self._request(running)

    def _session_ended(self, exit_code: int, kept: bool, number: int) -> None:
        self._ready.clear()
        self._shell_processes.session_ended()
        self._end_of_session = (exit_code, kept)
        self._unconfirmed = next((running for running in self._running.values() if not running.new_process), None)
        self._connected = None
        self._send(b"g%07d" % number)

    @property
    def dead(self) -> bool:
        """Whether the sandbox is gone."""
        return self._exit_cause is not None

    def _flood(self) -> None:
        """Stop the sandbox because its processes flooded the pipes."""
        if not self.dead:
            self.own_doing = flooded_error()
            self._die("its processes flooded the channels of its shell")
            self._process.kill()

    def _ended(self) -> None:
        """Handle the exit of process 1, and so of all processes."""
        if not self.dead and self._process.ran_out_of_memory:
            self.own_doing = SandboxOutOfMemory(
                f"The sandbox was stopped, because its processes took more than its memory limit of "
                f"{self._process.spec.memory_limit} bytes, until nothing else could be killed. It runs no more "
                "commands, and its files are lost."
            )
        self._die(self._process.exit_cause())

    def _die(self, cause: str) -> None:
        if self.dead:
            return
        self._exit_cause = cause
        self._reports.close()
        self._ready.set()
        self._thawed.set()
        for running in self._running.values():
            running.finish(137)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(self, running: PipeCommand) -> asyncio.Task[None]:
        task = asyncio.create_task(self._kill(running))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _kill(self, running: PipeCommand) -> None:
        await self._thawed.wait()
        try:
            if not self.dead:
                await (self._kill_process(running) if running.new_process else self._kill_in_session(running))
        finally:
            if running.new_process:
                self._running.pop(running.number, None)

    async def _kill_in_session(self, running: PipeCommand) -> None:
        """Kill the command's processes and make the session abandon it, keeping its variables if possible."""
        session = self._shell_processes.session
        if session is None:
            await self._restarted(_RESTART_GRACE_S)
            return
        self._ready.clear()
        if self._session_works:  # a session that never finished a command may be broken
            await self._launcher.run_blocking(self._kill_processes, running, session, signal.SIGTERM)
            # a signal just before bash blocks in "read" is handled only after it: this word ends that "read"
            self._send(b"x%07d" % 0)
            if await self._restarted(_KEEP_GRACE_S / 2):
                return
            # bash may have forked once more before it handled the signal, and waits for that child
            await self._launcher.run_blocking(self._kill_processes, running, session, signal.SIGCONT)
            if await self._restarted(_KEEP_GRACE_S / 2):
                return
        self._next_directory = await self._launcher.run_blocking(self._directory_of, session)
        await self._launcher.run_blocking(self._kill_processes, running, session, signal.SIGKILL)
        if not await self._restarted(_RESTART_GRACE_S):
            self._process.kill()

    async def _kill_process(self, running: PipeCommand) -> None:
        """Kill a command that runs in a process of its own."""
        await self._launcher.run_blocking(self._kill_processes, running, None, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended(), _KEEP_GRACE_S)
        if not running.started:  # a process inside may have stopped the spawner, perhaps before its report
            for pid in children(self._processes.init_pid):
                self._processes.signal(pid, signal.SIGCONT)
        session, spawner = self._shell_processes.session, self._shell_processes.spawner
        if not running.started and session is not None and spawner not in children(self._processes.init_pid):
            self._processes.signal(session, signal.SIGKILL)  # when the session restarts, so does the spawner
        running.finish(137)

    async def _restarted(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ready.wait(), patience_s)
        except TimeoutError:
            return False
        return True

    def _kill_processes(self, running: PipeCommand, session: int | None, number: signal.Signals) -> None:
        """Kill all processes of a command, including orphans; then signal the session, if one is given.

        Orphans of a concurrent command cannot be distinguished, so they are killed too.
        """
        init_pid, spawner = self._processes.init_pid, self._shell_processes.spawner
        parent: int | None = session
        if session is not None:
            self._processes.signal(session, signal.SIGSTOP)  # it must not run the command's next line
            _wait_until_stopped(session)
        elif running.process and spawner is not None:
            parent = self._processes.host_pid(running.process, spawner)
        spared = running.excluded_pids | self._shell_processes.pids
        for _ in range(_KILL_ROUNDS):
            roots = set(children(parent)) if parent is not None else set()
            roots = (roots | set(children(init_pid))) - spared
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


def _wait_until_stopped(pid: int) -> None:
    """Wait briefly until SIGSTOP has taken effect. Until then a process can still fork."""
    for _ in range(_STOP_POLLS):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        if stat.rpartition(")")[2].split()[0] in "TtZX":
            return
        time.sleep(_STOP_POLL_S)

"""PipeShell: the shell of a bubblewrap sandbox, with a persistent session and commands in processes of their own.

The session is a bash that runs each command in itself, so its directory and variables persist. It keeps its output
pipes until a command leaves a process behind that holds them too. The next command then gets new pipes, and later
output of that process is discarded. Commands in processes of their own have pipes of their own. The end of a command is
reported on a pipe of the shell's, so nobody waits for the end of its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from pathlib import Path

from agentfly.core.errors import ResourceDied, ResourceError, SandboxEnded, SandboxOutOfMemory
from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess
from agentfly.resources.containers.bubblewrap.shell_io import PipeCommand, ShellDirectory
from agentfly.resources.containers.bubblewrap.shell_processes import ReportReader, ShellProcesses
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.shell import flooded_error
from agentfly.resources.process.procfs import children

_KEEP_GRACE_S = 0.5  # for a session to keep its variables once its command has been killed
_RESTART_GRACE_S = 5.0
_SWEEPS = 10
_LONGEST_NUMBER = 10**7  # that a word of the session can hold


class PipeShell:
    """The host's side of a sandbox's shell.

    Data from inside is never trusted. All processes of a sandbox run as one user, so any of them can write what the
    shell
    would write. A forged report can fake the end of a command or its exit code. It cannot reach beyond the sandbox or
    block
    the event loop. A sandbox whose processes flood the shell's pipes is stopped.
    """

    def __init__(self, bubble: BubblewrapProcess) -> None:
        """Attach to a sandbox that has been started."""
        assert bubble.launched is not None
        assert bubble.processes is not None
        self._bubble = bubble
        self._launcher = bubble.launcher
        self._exchange = ShellDirectory(bubble.shell_directory, bubble.launcher)
        self._processes = bubble.processes
        self._requests = bubble.launched.requests
        self._starts = self._exchange.open_spawn_pipe()
        self._names = itertools.count(1)
        self._running: dict[int, PipeCommand] = {}
        self._kills: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # the session takes one command at a time
        self._going = asyncio.Event()  # the sandbox is not frozen
        self._going.set()
        self._keepers = ShellProcesses(
            self._processes,
            bubble.launcher,
            session_began=self._session_began,
            starter_began=self._starter_began,
        )
        self._known: frozenset[int] = frozenset()  # what was below the two before the last command of the session
        self._ready = asyncio.Event()  # there is a session
        self._session_works = False  # the session has finished a command since it began
        self._end_of_session = (0, False)  # exit code of the one before, and whether its variables were kept
        self._unconfirmed: PipeCommand | None = None  # sent to the last session, which may not have started it
        self._directory = ""  # where the next command must go first, because its session could not keep it
        self._exit_cause: str | None = None
        self.own_doing: SandboxEnded | None = None  # why its own processes caused its end
        self._reports = ReportReader(
            bubble.launched.reports,
            report=self._report,
            ended=self._ended,
            flooded=self._flood,
        )
        self._connected: tuple[int, int] | None = None  # the numbers of the session's pipes and input
        self._send(b"g%07d" % 1)

    async def ready(self) -> None:
        """Wait for the session to take commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        await self._ready.wait()
        self.check()

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command and wait for it, for at most `timeout` seconds; then it is killed with all that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            SandboxEnded: it was ended for what its processes did.
            ResourceError: the host has no room for the command's input, or too many files open.
        """
        if command.new_process:
            return await self._run(command, timeout)
        async with self._turn:
            return await self._run(command, timeout)

    def close(self) -> None:
        """Release the sandbox, which is about to end or has ended."""
        self._die("it was released or reset")
        self._exchange.close()
        self._keepers.close()
        if self._starts >= 0:
            os.close(self._starts)
            self._starts = -1

    async def pause(self) -> None:
        """Prepare for a freeze: wait for commands that are being killed, and stop the clocks of the others.

        Killing a command needs processes inside, so none is killed before `resume`.
        """
        while self._kills:
            await asyncio.wait(self._kills)
        if not self.dead:
            self._going.clear()
        for running in self._running.values():
            running.time.pause()

    def resume(self) -> None:
        """Restart the clocks after a thaw."""
        self._going.set()
        for running in self._running.values():
            running.time.resume()

    @property
    def shell_pids(self) -> set[int]:
        """The host's ids of the processes that the shell itself consists of, beside process 1."""
        return self._keepers.pids

    async def _run(self, command: Command, timeout: float) -> CommandOutcome:
        if self._kills:  # the end of a command whose caller has left
            await asyncio.wait(self._kills)
        self.check()
        name = next(self._names)
        directory = self._directory if not command.new_process else ""
        try:
            await self._exchange.write_command(name, command, directory)
            self.check()
            if directory:
                self._directory = ""
            running = self._begin(name, command)
            try:
                exit_code = await self._end_of(running, timeout)
            finally:
                if running.exit_code is not None or not running.new_process:  # otherwise it is just being killed
                    self._running.pop(name, None)
                self._exchange.finish_output(running.pipes)
        finally:
            self._exchange.remove_command(name)
        self.check()
        return running.outcome(exit_code)

    def _begin(self, name: int, command: Command) -> PipeCommand:
        """Ask for a command whose script and input are in place."""
        before = self._keepers.children(of_session=not command.new_process)
        try:
            if command.new_process:
                number, pipes = self._exchange.new_pipes()
            else:
                # a process that still holds the session's pipes was started by the last command, or descends from one
                # that was
                shared = before != self._known and bool(before - self._known - self.shell_pids)
                number, pipes = self._exchange.session_pipes(anew=shared)
                self._known = before
            running = PipeCommand(name, command, pipes, before, frozen=not self._going.is_set())
        except OSError as error:
            raise ResourceError(f"The output of a command could not be connected: {error}") from error
        self._running[name] = running
        running.connections = (number, name if command.stdin is not None else 0)
        self._request(running)
        return running

    async def _end_of(self, running: PipeCommand, timeout: float) -> int | None:
        """Wait for the end of a command; None if it had to be killed because it ran out of time."""
        self._reports.look()  # it may have ended at once
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
        """Have a command begin."""
        self._reports.add_request()
        pipes, given = running.connections
        if running.new_process:
            # a starter that is just being killed may still take one byte: the empty line is for that one
            self._send(b"\n%d %d %d\n" % (running.number, pipes, given), self._starts)
        elif self._connected == running.connections:
            self._send(b"%08d" % running.number)
        else:
            self._connected = running.connections
            self._send(b"c%07di%07d%08d" % (pipes, given, running.number))

    def _send(self, words: bytes, pipe: int | None = None) -> None:
        try:
            os.write(self._requests if pipe is None else pipe, words)
        except BlockingIOError:  # our requests are read one by one, so another process has written there
            self._flood()
        except OSError as error:
            self._die(f"its shell takes no more commands ({error})")

    def check(self) -> None:
        """Check that it takes commands.

        Raises:
            ResourceDied: the sandbox ended.
            SandboxEnded: its processes caused its end.
        """
        if self.own_doing is not None:
            raise type(self.own_doing)(*self.own_doing.args)
        if self._exit_cause is not None:
            raise ResourceDied(f"The sandbox {self._bubble.name} is gone: {self._exit_cause}.")

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
            case b"h", [inside, asked] if self._keepers.session is None:  # nobody waits for another
                self._keepers.session_reported(inside, asked)
            case b"f", [inside]:
                self._keepers.starter_reported(inside)
            case b"e", [exit_code, kept, number] if exit_code in range(256) and number < _LONGEST_NUMBER:
                if not self._keepers.session_lives:
                    self._session_ended(exit_code, bool(kept), number)

    def _starter_began(self, present: set[int]) -> None:
        """What was started before it may have been killed with the one before."""
        for running in self._running.values():
            if running.process and running.process not in present:
                running.finish(137)

    def _session_began(self, asked: int) -> None:
        """A session is ready. Nobody has begun the command `asked`, for by then the session before had ended."""
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
            where = self._directory or self._bubble.spec.workdir
            running.note = f"the shell was started anew in {where}; its variables and functions are lost"
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
        self._keepers.session_ended()
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
            self._die("its processes flooded it")
            self._bubble.kill()

    def _ended(self) -> None:
        """Handle the exit of process 1, and so of all processes."""
        if not self.dead and self._bubble.ran_out_of_memory:
            self.own_doing = SandboxOutOfMemory(
                f"The sandbox was ended, because what runs in it took more than its memory limit of "
                f"{self._bubble.spec.memory_limit} bytes, until nothing else could be killed. No command can be run in "
                "it any more, and its files are lost."
            )
        self._die(self._bubble.exit_cause())

    def _die(self, cause: str) -> None:
        if self.dead:
            return
        self._exit_cause = cause
        self._reports.close()
        self._ready.set()
        self._going.set()
        for running in self._running.values():
            running.finish(137)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(self, running: PipeCommand) -> asyncio.Task[None]:
        task = asyncio.create_task(self._kill(running))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _kill(self, running: PipeCommand) -> None:
        await self._going.wait()
        try:
            if not self.dead:
                await (self._kill_process(running) if running.new_process else self._kill_in_session(running))
        finally:
            if running.new_process:
                self._running.pop(running.number, None)

    async def _kill_in_session(self, running: PipeCommand) -> None:
        """Kill what the command started, and make the session give up the command, keeping its variables if it can."""
        session = self._keepers.session
        if session is None:
            await self._restarted(_RESTART_GRACE_S)
            return
        self._ready.clear()
        if self._session_works:  # a session that never finished anything may be one that cannot
            await self._launcher.run_blocking(self._kill_processes, running, session, signal.SIGTERM)
            if await self._restarted(_KEEP_GRACE_S):
                return
        self._directory = await self._launcher.run_blocking(self._directory_of, session)
        await self._launcher.run_blocking(self._kill_processes, running, session, signal.SIGKILL)
        if not await self._restarted(_RESTART_GRACE_S):
            self._bubble.kill()

    async def _kill_process(self, running: PipeCommand) -> None:
        """Kill a command that has a process of its own."""
        await self._launcher.run_blocking(self._kill_processes, running, None, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended(), _KEEP_GRACE_S)
        if not running.started:  # somebody inside may have stopped the starter, perhaps before it said that it is ready
            for keeper in children(self._processes.init_pid):
                self._processes.signal(keeper, signal.SIGCONT)
        session, starter = self._keepers.session, self._keepers.starter
        if not running.started and session is not None and starter not in children(self._processes.init_pid):
            self._processes.signal(session, signal.SIGKILL)  # what follows a session brings the starter back
        running.finish(137)

    async def _restarted(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ready.wait(), patience_s)
        except TimeoutError:
            return False
        return True

    def _kill_processes(self, running: PipeCommand, session: int | None, number: signal.Signals) -> None:
        """Kill all processes of a command, including those that left its process tree; then signal the session, if
        given.

        Processes that left the tree of a concurrent command cannot be told apart, and are killed too.
        """
        first, starter = self._processes.init_pid, self._keepers.starter
        parent: int | None = session
        if session is not None:
            self._processes.signal(session, signal.SIGSTOP)  # it must not go on to the command's next line
        elif running.process and starter is not None:
            parent = self._processes.host_pid(running.process, starter)
        spared = running.excluded_pids | self._keepers.pids
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

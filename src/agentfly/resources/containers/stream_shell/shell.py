"""StreamShell: the shell of a sandbox that is reached only by streams.

One stream leads to a server inside, which takes requests and starts commands. A session, which is a bash, runs most
commands in itself. Each command has a stream for its output: the server's, or another that is opened on demand and
kept. The end of a command is reported on these outputs too, so the shell never waits for EOF. A stream serves no other
command while a process of an earlier command may still write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from agentfly.core.errors import ResourceDied, ResourceError, SandboxEnded
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.shell import FloodLimiter, flooded_error
from agentfly.resources.containers.stream_shell.channels import (
    Channel,
    ChannelPool,
    OpenStream,
    Stream,
    StreamCommand,
)
from agentfly.resources.containers.stream_shell.protocol import (
    NO_INPUT,
    ShellScripts,
    parse_number,
    request,
    stdin_chunks,
)

_KEEP_GRACE_S = 0.5  # for a session to save its variables after a kill
_RESTART_GRACE_S = 5.0
_REPORT_TIMEOUT_S = 5.0
_KILLS = 10  # at most, within `_REPORT_TIMEOUT_S`
_MAX_RESENDS = 3
_LEAST_REPORTS, _REPORTS_PER_SECOND, _REPORTS_PER_REQUEST = 256, 64, 64  # of the flood limiter


class StreamShell:
    """The host's side of the shell.

    Data from inside is never trusted. A forged report can fake the end of a command or its exit code. It can neither
    affect anything outside the sandbox nor block other sandboxes, and the server receives only numbers from it. A
    sandbox whose processes flood the shell with reports is stopped.

    Attributes:
        own_doing: the error of every call, once the sandbox was stopped for what its own processes did.
    """

    def __init__(
        self,
        stream: Stream,
        scripts: ShellScripts,
        open_stream: OpenStream,
        *,
        workdir: str,
        describe_end: Callable[[], Awaitable[str]],
        is_init: bool = True,
        first_file_number: int = 1,
    ) -> None:
        """Attach to a server.

        Args:
            stream: the stream of the server.
            scripts: the scripts that the server runs.
            open_stream: runs another program inside.
            workdir: the directory in which a session starts.
            describe_end: returns why the stream has ended, as text for users.
            is_init: whether the server is process 1 inside, which adopts orphans.
            first_file_number: the first number for the files of commands, if several shells share a directory. Shells
                other than the first run commands only in new processes.
        """
        self._scripts = scripts
        self._open = open_stream
        self._workdir = workdir
        self._describe_end = describe_end
        self._first_file_number = first_file_number
        self._orphans = "1" if is_init else "-"
        self._numbers = itertools.count(1)
        self._running: dict[int, StreamCommand] = {}
        self._session_lock = asyncio.Lock()  # the session takes one command at a time
        self._kills: set[asyncio.Task[None]] = set()
        self._openings: set[asyncio.Future[Any]] = set()  # channels that are being opened
        self._thawed = asyncio.Event()  # set unless the sandbox is frozen
        self._thawed.set()
        self._ready = asyncio.Event()  # set while there is a session
        self._reset_done: asyncio.Future[bool] | None = None
        self._server_pid = self._dispatcher = self._session = 0  # process ids inside; 0: none
        self._excluded_pids = ""  # children of the session and of process 1 when its last command ended
        self._oom_kills = 0
        self._session_works = False  # whether this session has finished a command
        self._exit_cause: str | None = None
        self.own_doing: SandboxEnded | None = None
        self._flood_limiter = FloodLimiter(
            _LEAST_REPORTS, per_second=_REPORTS_PER_SECOND, per_request=_REPORTS_PER_REQUEST
        )
        self._ending: asyncio.Task[None] | None = None
        self._channels = ChannelPool(stream, scripts, open_stream, self._report, self._main_closed, self._abandoned)
        self._main = self._channels.server_channel

    async def start(self, server: bytes) -> None:
        """Send the server its script, and wait until the session takes commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        with contextlib.suppress(OSError):  # the end of the stream is reported otherwise
            await self._main.write(server)
        await self._ready.wait()
        await self._check()

    @property
    def dead(self) -> bool:
        """Whether the sandbox is known to take no more commands."""
        return self._exit_cause is not None or self._main.ended

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command. After `timeout` seconds, kill it with all processes that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did, or the connection to it failed.
            SandboxEnded: the sandbox was stopped for what its processes did.
        """
        if command.new_process:
            return await self._run(command, timeout)
        async with self._session_lock:
            return await self._run(command, timeout)

    async def reset(self, directories: Sequence[str], timeout_s: float) -> bool:
        """Kill every process inside, empty the directories, and start a new session within `timeout_s`.

        Returns:
            Whether everything was removed. If not, the sandbox must not be used again.
        """
        if self.dead or self._session_lock.locked() or self._running or self._kills:
            return False
        await self._channels.close_others()
        self._reset_done = asyncio.get_running_loop().create_future()
        self._ready.clear()
        try:
            async with asyncio.timeout(timeout_s):
                data = "\n".join(directories).encode("utf-8", "surrogateescape")
                await self._main.write(request(self._scripts.nonce, "r", data=data))
                if not await self._reset_done:
                    return False
                await self._ready.wait()
        except (TimeoutError, OSError):
            return False
        finally:
            self._reset_done = None
        self._main.has_lingering_writer = False
        self._excluded_pids, self._session_works = "", False
        return not self.dead

    async def pause(self) -> None:
        """Prepare for a freeze: wait for pending kills, and stop the clocks of running commands.

        Killing a command and opening a stream need processes inside, so neither starts before `resume`.
        """
        while busy := self._kills | self._openings:
            await asyncio.wait(busy)
        if not self.dead:
            self._thawed.clear()
        for running in self._running.values():
            running.time.pause()

    def resume(self) -> None:
        """Restart the clocks after a thaw."""
        self._thawed.set()
        for running in self._running.values():
            running.time.resume()

    async def close(self, cause: str = "it was released or reset") -> None:
        """Detach from the sandbox, which is about to end or has ended."""
        self._die(cause)
        if self._ending is not None:
            self._ending.cancel()
        await self._channels.close()

    # --- one command ------------------------------------------------------------------------------------------------

    async def _run(self, command: Command, timeout: float) -> CommandOutcome:
        if self._kills:  # commands whose caller was cancelled
            await asyncio.wait(self._kills)
        await self._check()
        self._flood_limiter.add_request()
        files = {running.file for running in self._running.values()}
        file = next(n for n in itertools.count(self._first_file_number) if n not in files) if command.new_process else 0
        running = StreamCommand(next(self._numbers), command, file, frozen=not self._thawed.is_set())
        running.excluded_pids, running.oom_kills = self._excluded_pids, self._oom_kills
        self._running[running.number] = running
        try:
            channel = await self._channel_for(running)
            code = await self._run_on_channel(running, command, channel, timeout)
        finally:
            if running.killing is None or running.killing.done():
                self._forget(running)
        await self._check()
        kills_before, self._oom_kills = self._oom_kills, max(self._oom_kills, running.oom_kills)
        return running.outcome(code, out_of_memory=running.oom_kills > kills_before)

    def _forget(self, running: StreamCommand) -> None:
        """Accept no more reports about a command, and release its channel."""
        self._running.pop(running.number, None)
        for channel in self._channels:
            if channel.command is running:
                channel.has_lingering_writer = channel.has_lingering_writer or running.exit_code is None
                channel.command = None

    async def _channel_for(self, running: StreamCommand) -> Channel:
        await self._thawed.wait()
        opening = asyncio.get_running_loop().create_future()
        self._openings.add(opening)
        try:
            return await self._channels.acquire(running)
        finally:
            self._openings.discard(opening)
            opening.set_result(None)

    async def _run_on_channel(
        self, running: StreamCommand, command: Command, channel: Channel, timeout: float
    ) -> int | None:
        """Start a command and wait for its end. Return None if it was killed at its time limit."""
        sending = asyncio.create_task(self._send(running, command, channel))
        try:
            code = await running.wait(timeout)
            if code is None and (killing := self._begin_kill(running, channel, sending)) is not None:
                await asyncio.shield(killing)
        except asyncio.CancelledError:
            if running.exit_code is None:
                self._begin_kill(running, channel, sending)
            raise
        finally:
            sending.cancel()
        return code

    async def _send(self, running: StreamCommand, command: Command, channel: Channel) -> None:
        source, stdin = command.source, NO_INPUT
        if prelude := command.prelude:
            source = b"( %s\n%s\n)" % (prelude, source)
        try:
            if command.stdin is not None:
                stdin = f"{self._scripts.directory}/{running.file}.in"
                await self._ask("n", argument=running.file)
                for chunk in stdin_chunks(command.stdin):
                    await self._ask("i", argument=running.file, data=chunk)
            kind, known = "p" if running.new_process else "s", (self._server_pid, self._dispatcher, self._session)
            fields = {"number": running.number, "argument": running.file, "holder": channel.holder, "stdin": stdin}
            running.requested = True
            await self._ask(kind, known=known, data=source, **fields)
        except OSError as error:
            self._die(f"its shell takes no more commands ({error})")

    async def _ask(self, kind: str, **fields: Any) -> None:
        await self._main.write(request(self._scripts.nonce, kind, **fields))

    async def _check(self) -> None:
        if self._exit_cause is None and self._ending is not None:
            await asyncio.wait({self._ending})
        if self.own_doing is not None:
            raise type(self.own_doing)(*self.own_doing.args)
        if self._exit_cause is not None:
            raise ResourceDied(f"The sandbox is gone: {self._exit_cause}.")

    # --- the end of the sandbox -------------------------------------------------------------------------------------

    def _main_closed(self) -> None:
        if self._exit_cause is None and self._ending is None:
            self._ending = asyncio.create_task(self._find_cause())

    async def _find_cause(self) -> None:
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                cause = await self._describe_end()
        except Exception as error:
            cause = f"the stream to it ended, and the reason could not be determined ({type(error).__name__}: {error})"
        self._die(cause)

    def _flood(self) -> None:
        """Stop the sandbox because its processes flooded the shell."""
        if not self.dead:
            self.own_doing = flooded_error()
            self._die("its processes flooded the channels of its shell")
            self._channels.stop()
            self._in_background(self._end_processes())

    async def _end_processes(self) -> None:
        """Kill the processes inside. The rest is removed with the sandbox."""
        with contextlib.suppress(OSError, ResourceError, TimeoutError):
            async with asyncio.timeout(_RESTART_GRACE_S):
                await self._kill_all()

    def _die(self, cause: str) -> None:
        if self._exit_cause is None:
            self._exit_cause = cause
        self._ready.set()
        self._thawed.set()
        if self._reset_done is not None and not self._reset_done.done():
            self._reset_done.set_result(False)
        for running in self._running.values():
            running.finish(137)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(self, channel: Channel, output: int, word: str, words: list[str]) -> None:
        if not self._flood_limiter.spend(1):
            self._flood()
            return
        try:
            match word:  # reports of the server count only on its own stream
                case "b" | "d":
                    self._command_reported(channel, output, word, words)
                case "o" if channel is not self._main and not channel.ready.is_set():
                    channel.holder = parse_number(words[0])
                    channel.ready.set()
                case "x" if channel is self._main:
                    self._resend_unstarted(parse_number(words[0]))
                case "h" if channel is self._main:
                    self._session, self._session_works = parse_number(words[0]), False
                    channel.ready.set()
                    self._ready.set()
                case "f" if channel is self._main:
                    self._dispatcher_started(*map(parse_number, words))
                case "e" if channel is self._main and self._reset_done is None:
                    if (code := parse_number(words[0])) in range(256):
                        self._session_ended(code, kept=words[1] == "1")
                case "r" if channel is self._main and self._reset_done is not None:
                    if not self._reset_done.done():
                        self._reset_done.set_result(words == ["0"])
        except (ValueError, IndexError, TypeError):
            return  # not written by our scripts

    def _command_reported(self, channel: Channel, output: int, word: str, words: list[str]) -> None:
        if (running := self._running.get(parse_number(words[0]))) is None:
            return
        if word == "b":
            running.started = True
            return
        code = 0
        if output == 1:
            code = parse_number(words[1])
            if code not in range(256):
                return
            channel.has_lingering_writer = words[2] != "0"
            running.oom_kills = parse_number(words[3])
            if not running.new_process:
                self._session_works = True
                self._excluded_pids = " ".join(str(parse_number(process)) for process in words[4:] if process)
        running.end_reported(output, code)

    def _resend_unstarted(self, number: int) -> None:
        """Move a command that has not started to another channel, because its channel was closed unnoticed."""
        for channel in self._channels:
            running = channel.command
            if (
                running is not None
                and running.number == number
                and not running.started
                and running.resent < _MAX_RESENDS
            ):
                running.resent += 1
                channel.command, channel.has_lingering_writer = None, True
                self._in_background(self._resend(running))

    async def _resend(self, running: StreamCommand) -> None:
        try:
            await self._send(running, running.command, await self._channel_for(running))
        except ResourceError as error:
            self._die(str(error))

    def _dispatcher_started(self, server: int, dispatcher: int) -> None:
        restarted = self._dispatcher != 0 and self._reset_done is None
        self._server_pid, self._dispatcher = server, dispatcher
        if restarted:  # commands in processes of their own may have ended with the previous dispatcher
            for running in self._running.values():
                if running.new_process and not running.closing:
                    running.closing = True
                    asyncio.get_running_loop().call_later(1.0, running.finish, 137)

    def _session_ended(self, code: int, *, kept: bool) -> None:
        self._ready.clear()
        self._session = 0
        for channel in self._channels:
            running = channel.command
            if running is None or running.closing or running.new_process or not running.started:
                continue
            if running.exit_code is None:
                running.closing = True
                if not kept:
                    running.note = f"the shell was restarted in {self._workdir}; its variables and functions are lost"
                # the next session reports when all output has been read
                self._in_background(self._finish_by_request(running, channel.holder, code))

    def _abandoned(self, running: StreamCommand) -> None:
        """Handle the end of a command's stream, for example because its holder was killed. Later output is lost."""
        if running.new_process:
            running.finish(137)
        elif running.exit_code is None:
            running.note = "the process that held its output was killed, so its end was not seen"
            self._in_background(self._finish_by_request(running, 0, 137))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that the next command waits for."""
        task = asyncio.create_task(work)
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _finish_by_request(self, running: StreamCommand, holder: int, code: int) -> None:
        await self._thawed.wait()
        with contextlib.suppress(OSError, TimeoutError):
            known = (self._server_pid, self._dispatcher)
            await self._ask("e", number=running.number, argument=code, holder=holder, known=known)
            await asyncio.wait_for(running.ended(), _REPORT_TIMEOUT_S)
        running.finish(code)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(
        self, running: StreamCommand, channel: Channel, sending: asyncio.Task[None]
    ) -> asyncio.Task[None] | None:
        """Start to kill a command. Reports are accepted until it has ended. None if its start was never requested."""
        sending.cancel()
        if running.killing is None and running.requested:
            running.killing = self._in_background(self._kill(running, channel))
            running.killing.add_done_callback(lambda _: self._forget(running))
        return running.killing

    async def _kill(self, running: StreamCommand, channel: Channel) -> None:
        await self._thawed.wait()
        if self.dead:
            return
        try:
            async with asyncio.timeout(4 * _RESTART_GRACE_S):
                await (
                    self._kill_new_process(running) if running.new_process else self._kill_in_session(running, channel)
                )
        except (OSError, TimeoutError) as error:
            self._die(f"a command in it could not be killed, so the connection to it may be broken ({error!r})")

    async def _kill_in_session(self, running: StreamCommand, channel: Channel) -> None:
        """Kill the command's processes and make the session abandon it, keeping its variables if possible."""
        session, keep = self._session, self._session_works
        channel.command = running
        # bash may fork once more before it handles TERM, and waits for that child: CONT kills the child
        signals = ("TERM", "CONT", "KILL") if keep else ("KILL",)
        for signal in signals:
            if session and running.exit_code is None:
                self._ready.clear()
                known = (self._server_pid, self._dispatcher, running.excluded_pids)
                await self._ask("k", number=session, argument=signal, holder=self._orphans, known=known)
            if await self._restarted(_RESTART_GRACE_S if signal == "KILL" else _KEEP_GRACE_S / 2):
                break
        else:
            await self._kill_everything()
        if channel is self._main and not running.started:  # its start would have been reported before the new session
            running.finish(137)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended(), _KEEP_GRACE_S)

    async def _kill_everything(self) -> None:
        """Kill all processes but process 1, for when the server does not react. Dispatcher and session then restart."""
        async with asyncio.timeout(_RESTART_GRACE_S):
            await self._kill_all()
        if not await self._restarted(_RESTART_GRACE_S):
            self._die("its shell does not restart")

    async def _kill_all(self) -> None:
        stream = await self._open(["/bin/bash", "-c", "kill -KILL -1"])
        try:
            while await stream.read() is not None:
                pass
        finally:
            await stream.close()

    async def _kill_new_process(self, running: StreamCommand) -> None:
        """Kill a command that runs in a process of its own."""
        known = (self._server_pid, self._dispatcher, self._session, self._excluded_pids)
        for _ in range(_KILLS):  # a starting command may have forked after a kill
            await self._ask("q", number=running.number, holder=self._orphans, known=known)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.ended(), _REPORT_TIMEOUT_S / _KILLS)
                break
        else:
            self._die("a command in it could not be killed, so the connection to it may be broken")

    async def _restarted(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

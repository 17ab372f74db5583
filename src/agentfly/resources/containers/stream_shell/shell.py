"""StreamShell: the shell of a sandbox that is reachable by streams alone.

One stream leads to a server inside, which takes requests and starts commands. A session bash runs most commands in
itself. Each command has a stream for its output: the server's, or another that is opened on demand and kept. The end of
a command is reported on these outputs too, so nobody waits for EOF. A stream that a process of an earlier command may
still write to serves no other command.
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
from agentfly.resources.containers.stream_shell.channels import Channel, ChannelPool, OpenStream, StreamCommand
from agentfly.resources.containers.stream_shell.protocol import (
    NO_INPUT,
    ShellScripts,
    parse_number,
    request,
    stdin_chunks,
)
from agentfly.resources.containers.stream_shell.stream import Stream

_KEEP_GRACE_S = 0.5  # for a session to keep its variables once its command has been killed
_RESTART_GRACE_S = 5.0
_REPORT_PATIENCE_S = 5.0
_KILLS = 10  # within the patience for a report
_TIMES_AGAIN = 3
_LEAST_REPORTS, _REPORTS_PER_SECOND, _REPORTS_PER_REQUEST = 256, 64, 64  # those that nobody inside needs to forge


class StreamShell:
    """The host's side of the shell.

    Data from inside is never trusted. A forged report can fake the end of a command or its exit code. It cannot reach
    beyond the sandbox or block others, and only numbers from it are passed on to the server. A sandbox whose processes
    flood the shell with reports is stopped.
    """

    def __init__(
        self,
        stream: Stream,
        scripts: ShellScripts,
        open_stream: OpenStream,
        *,
        workdir: str,
        describe_end: Callable[[], Awaitable[str]],
        first: bool = True,
        files_from: int = 1,
    ) -> None:
        """Attach to a server.

        Args:
            stream: the server's.
            scripts: those that the server runs.
            open_stream: runs another program inside.
            workdir: where a session begins.
            describe_end: says why the stream has ended, for people.
            first: whether the server is process 1 inside, which adopts orphans.
            files_from: the first number for the files of commands, where several shells share a directory. Shells other
                than the first run commands in new processes only.
        """
        self._scripts = scripts
        self._open = open_stream
        self._workdir = workdir
        self._describe_end = describe_end
        self._files_from = files_from
        self._orphans = "1" if first else "-"
        self._numbers = itertools.count(1)
        self._running: dict[int, StreamCommand] = {}
        self._turn = asyncio.Lock()  # the session takes one command at a time
        self._kills: set[asyncio.Task[None]] = set()
        self._openings: set[asyncio.Future[Any]] = set()  # of channels
        self._going = asyncio.Event()  # the sandbox is not frozen
        self._going.set()
        self._ready = asyncio.Event()  # there is a session
        self._reset_done: asyncio.Future[bool] | None = None
        self._server_pid = self._dispatcher = self._session = 0  # process ids inside
        self._spared = ""  # children of the session and of process 1 when its last command ended
        self._oom_kills = 0
        self._served = False  # the session has finished a command since it began
        self._died_of: str | None = None
        self.own_doing: SandboxEnded | None = None  # what its processes have done, that it has ended
        self._allowance = FloodLimiter(_LEAST_REPORTS, per_second=_REPORTS_PER_SECOND, per_request=_REPORTS_PER_REQUEST)
        self._ending: asyncio.Task[None] | None = None
        self._channels = ChannelPool(stream, scripts, open_stream, self._report, self._main_closed, self._abandoned)
        self._main = self._channels.server_channel

    async def start(self, keeper: bytes) -> None:
        """Send the server its source, and wait for its session to take commands.

        Raises:
            ResourceDied: the sandbox ended.
        """
        with contextlib.suppress(OSError):  # its end is noticed
            await self._main.write(keeper)
        await self._ready.wait()
        await self._check()

    @property
    def dead(self) -> bool:
        """Whether the sandbox takes no more commands, as far as is known."""
        return self._died_of is not None or self._main.ended

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command and wait for it, for at most `timeout` seconds; then it is killed with all that it started.

        Raises:
            ResourceDied: the sandbox ended before the command did, or the connection to it failed.
            SandboxEnded: it was ended for what its processes did.
        """
        if command.new_process:
            return await self._run(command, timeout)
        async with self._turn:
            return await self._run(command, timeout)

    async def reset(self, directories: Sequence[str], patience_s: float) -> bool:
        """Kill every process inside, empty the directories, and begin a new session.

        Returns:
            Whether nothing from before is left. If not, the sandbox must not be used again.
        """
        if self.dead or self._turn.locked() or self._running or self._kills:
            return False
        await self._channels.close_others()
        self._reset_done = asyncio.get_running_loop().create_future()
        self._ready.clear()
        try:
            async with asyncio.timeout(patience_s):
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
        self._spared, self._served = "", False
        return not self.dead

    async def pause(self) -> None:
        """Prepare for a freeze: wait for commands that are being killed, and stop the clocks of the others.

        Killing a command and opening a stream need processes inside, so neither is begun before `resume`.
        """
        while busy := self._kills | self._openings:
            await asyncio.wait(busy)
        if not self.dead:
            self._going.clear()
        for running in self._running.values():
            running.time.pause()

    def resume(self) -> None:
        """Restart the clocks after a thaw."""
        self._going.set()
        for running in self._running.values():
            running.time.resume()

    async def close(self, cause: str = "it was released or reset") -> None:
        """Release the sandbox, which is about to end or has ended."""
        self._die(cause)
        if self._ending is not None:
            self._ending.cancel()
        await self._channels.close()

    # --- one command ------------------------------------------------------------------------------------------------

    async def _run(self, command: Command, timeout: float) -> CommandOutcome:
        if self._kills:  # the end of a command whose caller has left
            await asyncio.wait(self._kills)
        await self._check()
        self._allowance.add_request()
        files = {running.file for running in self._running.values()}
        file = next(n for n in itertools.count(self._files_from) if n not in files) if command.new_process else 0
        running = StreamCommand(next(self._numbers), command, file, frozen=not self._going.is_set())
        running.excluded_pids, running.oom_kills = self._spared, self._oom_kills
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
        """Take no more reports about a command, and leave its channel to others."""
        self._running.pop(running.number, None)
        for channel in self._channels:
            if channel.command is running:
                channel.has_lingering_writer = channel.has_lingering_writer or running.exit_code is None
                channel.command = None

    async def _channel_for(self, running: StreamCommand) -> Channel:
        await self._going.wait()
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
        """Start a command and wait for its end; None if it had to be killed because it ran out of time."""
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
        if before := command.prelude:
            source = b"( %s\n%s\n)" % (before, source)
        try:
            if command.stdin is not None:
                stdin = f"{self._scripts.directory}/{running.file}.in"
                await self._ask("n", argument=running.file)
                for piece in stdin_chunks(command.stdin):
                    await self._ask("i", argument=running.file, data=piece)
            kind, known = "p" if running.new_process else "s", (self._server_pid, self._dispatcher, self._session)
            fields = {"number": running.number, "argument": running.file, "holder": channel.holder, "stdin": stdin}
            running.requested = True
            await self._ask(kind, known=known, data=source, **fields)
        except OSError as error:
            self._die(f"its shell takes no more commands ({error})")

    async def _ask(self, kind: str, **fields: Any) -> None:
        await self._main.write(request(self._scripts.nonce, kind, **fields))

    async def _check(self) -> None:
        if self._died_of is None and self._ending is not None:
            await asyncio.wait({self._ending})
        if self.own_doing is not None:
            raise type(self.own_doing)(*self.own_doing.args)
        if self._died_of is not None:
            raise ResourceDied(f"The sandbox is gone: {self._died_of}.")

    # --- the end of the sandbox -------------------------------------------------------------------------------------

    def _main_closed(self) -> None:
        if self._died_of is None and self._ending is None:
            self._ending = asyncio.create_task(self._find_cause())

    async def _find_cause(self) -> None:
        try:
            async with asyncio.timeout(_REPORT_PATIENCE_S):
                cause = await self._describe_end()
        except Exception as error:
            cause = f"the stream to it ended, and why could not be asked ({type(error).__name__}: {error})"
        self._die(cause)

    def _flood(self) -> None:
        """Stop the sandbox because its processes flooded the shell."""
        if not self.dead:
            self.own_doing = flooded_error()
            self._die("its processes flooded it")
            self._channels.stop()
            self._in_background(self._end_processes())

    async def _end_processes(self) -> None:
        """Kill the processes inside. The rest is removed with the sandbox."""
        with contextlib.suppress(OSError, ResourceError, TimeoutError):
            async with asyncio.timeout(_RESTART_GRACE_S):
                await self._kill_all()

    def _die(self, cause: str) -> None:
        if self._died_of is None:
            self._died_of = cause
        self._ready.set()
        self._going.set()
        if self._reset_done is not None and not self._reset_done.done():
            self._reset_done.set_result(False)
        for running in self._running.values():
            running.finish(137)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(self, channel: Channel, output: int, word: str, words: list[str]) -> None:
        if not self._allowance.spend(1):
            self._flood()
            return
        try:
            match word:  # the keeper's reports come on its own stream alone
                case "b" | "d":
                    self._command_reported(channel, output, word, words)
                case "o" if channel is not self._main and not channel.ready.is_set():
                    channel.holder = parse_number(words[0])
                    channel.ready.set()
                case "x" if channel is self._main:
                    self._send_again(parse_number(words[0]))
                case "h" if channel is self._main:
                    self._session, self._served = parse_number(words[0]), False
                    channel.ready.set()
                    self._ready.set()
                case "f" if channel is self._main:
                    self._dispatcher_began(*map(parse_number, words))
                case "e" if channel is self._main and self._reset_done is None:
                    if (code := parse_number(words[0])) in range(256):
                        self._session_ended(code, kept=words[1] == "1")
                case "r" if channel is self._main and self._reset_done is not None:
                    if not self._reset_done.done():
                        self._reset_done.set_result(words == ["0"])
        except (ValueError, IndexError, TypeError):
            return  # not one of ours

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
                self._served = True
                self._spared = " ".join(str(parse_number(process)) for process in words[4:] if process)
        running.end_reported(output, code)

    def _send_again(self, asked: int) -> None:
        """Move a command to another channel, because its channel closed unnoticed."""
        for channel in self._channels:
            running = channel.command
            if (
                running is not None
                and running.number == asked
                and not running.started
                and running.resent < _TIMES_AGAIN
            ):
                running.resent += 1
                channel.command, channel.has_lingering_writer = None, True
                self._in_background(self._resend(running))

    async def _resend(self, running: StreamCommand) -> None:
        try:
            await self._send(running, running.command, await self._channel_for(running))
        except ResourceError as error:
            self._die(str(error))

    def _dispatcher_began(self, keeper: int, dispatcher: int) -> None:
        again = self._dispatcher != 0 and self._reset_done is None
        self._server_pid, self._dispatcher = keeper, dispatcher
        if again:  # what waits for a process of its own may have gone with the one before
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
                    running.note = (
                        f"the shell was started anew in {self._workdir}; its variables and functions are lost"
                    )
                # the next session says when all that was printed has come
                self._in_background(self._finish_by_request(running, channel.holder, code))

    def _abandoned(self, running: StreamCommand) -> None:
        """Handle the end of a command's stream, as when its holder was killed: later output is lost."""
        if running.new_process:
            running.finish(137)
        elif running.exit_code is None:
            running.note = "what held its output was killed, so its end was not seen"
            self._in_background(self._finish_by_request(running, 0, 137))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that the next command waits for."""
        task = asyncio.create_task(work)
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
        return task

    async def _finish_by_request(self, running: StreamCommand, holder: int, code: int) -> None:
        await self._going.wait()
        with contextlib.suppress(OSError, TimeoutError):
            known = (self._server_pid, self._dispatcher)
            await self._ask("e", number=running.number, argument=code, holder=holder, known=known)
            await asyncio.wait_for(running.ended(), _REPORT_PATIENCE_S)
        running.finish(code)

    # --- ending a command -------------------------------------------------------------------------------------------

    def _begin_kill(
        self, running: StreamCommand, channel: Channel, sending: asyncio.Task[None]
    ) -> asyncio.Task[None] | None:
        """Begin to kill a command, about which reports are taken until it has ended; None if it was not asked for."""
        sending.cancel()
        if running.killing is None and running.requested:
            running.killing = self._in_background(self._kill(running, channel))
            running.killing.add_done_callback(lambda _: self._forget(running))
        return running.killing

    async def _kill(self, running: StreamCommand, channel: Channel) -> None:
        await self._going.wait()
        if self.dead:
            return
        try:
            async with asyncio.timeout(4 * _RESTART_GRACE_S):
                await (self._kill_alone(running) if running.new_process else self._kill_in_session(running, channel))
        except (OSError, TimeoutError) as error:
            self._die(f"a command could not be killed in it, so that the way to it may be broken ({error!r})")

    async def _kill_in_session(self, running: StreamCommand, channel: Channel) -> None:
        """Kill what the command started, and make the session give up the command, keeping its variables if it can."""
        session, keep = self._session, self._served
        channel.command = running
        signals = ("TERM", "KILL") if keep else ("KILL",)
        for signal in signals:
            if session and running.exit_code is None:
                self._ready.clear()
                known = (self._server_pid, self._dispatcher, running.excluded_pids)
                await self._ask("k", number=session, argument=signal, holder=self._orphans, known=known)
            if await self._restarted(_KEEP_GRACE_S if signal == "TERM" else _RESTART_GRACE_S):
                break
        else:
            await self._kill_everything()
        if channel is self._main and not running.started:  # its start would have been reported before the new session
            running.finish(137)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended(), _KEEP_GRACE_S)

    async def _kill_everything(self) -> None:
        """Kill all but process 1, whatever blocks the server. Its dispatcher and its session then start again."""
        async with asyncio.timeout(_RESTART_GRACE_S):
            await self._kill_all()
        if not await self._restarted(_RESTART_GRACE_S):
            self._die("its shell does not come back")

    async def _kill_all(self) -> None:
        stream = await self._open(["/bin/bash", "-c", "kill -KILL -1"])
        try:
            while await stream.read() is not None:
                pass
        finally:
            await stream.close()

    async def _kill_alone(self, running: StreamCommand) -> None:
        """Kill a command that has a process of its own."""
        known = (self._server_pid, self._dispatcher, self._session, self._spared)
        for _ in range(_KILLS):  # what was just beginning may have started its first process after one
            await self._ask("q", number=running.number, holder=self._orphans, known=known)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.ended(), _REPORT_PATIENCE_S / _KILLS)
                break
        else:
            self._die("a command could not be killed in it, so that the way to it may be broken")

    async def _restarted(self, patience_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ready.wait(), patience_s)
        except TimeoutError:
            return False
        return True

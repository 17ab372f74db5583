"""The output of commands in a `StreamShell`.

A StreamCommand is a command under way, a Channel a stream whose outputs serve one command at a time, and a ChannelPool
holds the channels of a shell.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence

from agentfly.core.errors import ResourceError
from agentfly.resources.containers.command import Command
from agentfly.resources.containers.shell import PendingCommand
from agentfly.resources.containers.stream_shell.protocol import ReportSplitter, ShellScripts

_UNREQUESTED_BYTES = 16 * 1024  # read at once while no command has the channel; the reader then pauses
_MAX_BYTES_PER_TURN = 2**20  # of the event loop
_DISCARD_PAUSE_S = 0.02

Report = Callable[["Channel", int, str, list[str]], None]


class Stream(ABC):
    """The input and outputs of a program, for one reader and any number of writers."""

    @abstractmethod
    async def read(self) -> tuple[int, bytes] | None:
        """Return the output (1 or 2) and the next data on it; None once the program or the connection has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the program's input. The data of one call stays together.

        Raises:
            OSError: the program takes no more input.
        """

    @abstractmethod
    async def end_input(self) -> None:
        """Close the program's input.

        Raises:
            OSError: the program takes no more input.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the input and release the stream. Idempotent."""


class StreamCommand(PendingCommand):
    """A command of a `StreamShell`.

    Attributes:
        command: what to run.
        file: the number of the files that hold its script and input.
        excluded_pids: children of the session and of process 1 that were there before it.
        requested: whether its start was requested.
        killing: the task that kills it, once begun.
        resent: how often it was moved to another channel.
        closing: whether its end is being determined, because the process that ran it has exited.
        oom_kills: processes that the kernel has killed for memory in the sandbox's whole life.
    """

    def __init__(self, number: int, command: Command, file: int, *, frozen: bool) -> None:
        """Create the command; nothing is sent yet."""
        super().__init__(number, command, frozen=frozen)
        self.command = command
        self.file = file
        self.excluded_pids = ""
        self.requested = False
        self.killing: asyncio.Task[None] | None = None
        self.resent = 0
        self.closing = False
        self.oom_kills = 0
        self._reported_code: int | None = None
        self._stderr_done = False

    def add(self, output: int, data: bytes) -> None:
        """Append output: of stdout (1) or stderr (2)."""
        (self.stdout if output == 1 else self.stderr).add(data)

    def end_reported(self, output: int, code: int) -> None:
        """Record the report of its end on one output. It has ended when both outputs are read up to this report."""
        if output == 1:
            self._reported_code = code
        else:
            self._stderr_done = True
        if self._reported_code is not None and self._stderr_done:
            self.finish(self._reported_code)


class Channel:
    """Reads a stream: reports, which begin with a mark, and the output of commands.

    While no command has the channel, output is read slowly and discarded. Its writer neither fails nor blocks anything.
    Any process that has the outputs open can forge reports, which harms only the agent itself.

    Attributes:
        holder: the process inside that holds the outputs open for commands; 0 for the shell's server.
        has_lingering_writer: whether a process of an earlier command may still write to it.
        command: the command that has the channel.
        ready: set once the channel can serve commands, or has ended.
        ended: whether the stream has ended, or reading was stopped.
    """

    def __init__(self, stream: Stream, mark: bytes, report: Report, closed: Callable[[Channel], None]) -> None:
        """Start to read.

        Args:
            stream: the stream to read. `close` closes it.
            mark: the bytes with which every report begins.
            report: called for each report, with this channel, the output (1 or 2), the first word and the other words.
            closed: called when the stream has ended.
        """
        self.holder = 0
        self.has_lingering_writer = False
        self.command: StreamCommand | None = None
        self.ready = asyncio.Event()
        self.ended = False
        self._stream = stream
        self._report = report
        self._closed = closed
        self._splitters = {1: ReportSplitter(mark), 2: ReportSplitter(mark)}
        self._reader = asyncio.create_task(self._read())

    @property
    def idle(self) -> bool:
        """Whether it can serve another command."""
        return self.ready.is_set() and self.command is None and not self.has_lingering_writer and not self.ended

    async def write(self, data: bytes) -> None:
        """Write to the program's input.

        Raises:
            OSError: the program takes no more input.
        """
        await self._stream.write(data)

    async def close(self) -> None:
        """Stop reading and close the stream."""
        self._reader.cancel()
        await asyncio.wait({self._reader})
        with contextlib.suppress(OSError):
            await self._stream.close()

    def stop(self) -> None:
        """Stop reading. The rest of the stream is ignored."""
        self.ended = True
        self._reader.cancel()

    async def _read(self) -> None:
        try:
            read = 0
            while not self.ended and (chunk := await self._stream.read()) is not None:
                output, data = chunk
                self._take(output, data)
                read += len(data)
                if self.command is None and read > _UNREQUESTED_BYTES:
                    read = 0
                    await asyncio.sleep(_DISCARD_PAUSE_S)
                elif read > _MAX_BYTES_PER_TURN:
                    read = 0
                    await asyncio.sleep(0)
        except OSError:
            pass  # a broken connection is the end of the stream
        finally:
            self.ended = True
            self.ready.set()
            self._closed(self)

    def _take(self, output: int, data: bytes) -> None:
        for chunk in self._splitters[output].split(data):
            if self.ended:
                return
            if isinstance(chunk, list):
                word, *words = chunk
                self._report(self, output, word, words)
            elif self.command is not None:
                self.command.add(output, chunk)


_OPEN_TIMEOUT_S = 30.0
_MAX_LINGERING = 8  # channels with a lingering writer that stay open, so that its output does not fail

OpenStream = Callable[[Sequence[str]], Awaitable[Stream]]
"""Runs a program inside, as the user of the shell, with a stream of its own."""


class ChannelPool:
    """Channels for commands. They are opened on demand and kept for later commands.

    Attributes:
        server_channel: the channel of the server's stream.
    """

    def __init__(
        self,
        stream: Stream,
        scripts: ShellScripts,
        open_stream: OpenStream,
        report: Report,
        main_closed: Callable[[], None],
        abandoned: Callable[[StreamCommand], None],
    ) -> None:
        """Start to read the server's stream.

        Args:
            stream: the stream of the server.
            scripts: the scripts of the shell.
            open_stream: runs another program inside.
            report: called for each report on any channel.
            main_closed: called when the server's stream has ended.
            abandoned: called with a command whose stream has ended before the command.
        """
        self._scripts = scripts
        self._open = open_stream
        self._report = report
        self._main_closed = main_closed
        self._abandoned = abandoned
        self._others: list[Channel] = []
        self.server_channel = Channel(stream, scripts.mark, report, self._closed)

    def __iter__(self) -> Iterator[Channel]:
        return iter((self.server_channel, *self._others))

    async def acquire(self, running: StreamCommand) -> Channel:
        """Return an idle channel for a command, opening one if necessary.

        Raises:
            ResourceError: a channel could not be opened.
        """
        for channel in self:
            if channel.idle:
                channel.command = running
                return channel
        await self._close_lingering()
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                stream = await self._open(self._scripts.holder())
                channel = Channel(stream, self._scripts.mark, self._report, self._closed)
                channel.command = running
                self._others.append(channel)
                await channel.ready.wait()
        except TimeoutError:
            raise ResourceError(
                f"Another stream to the sandbox could not be opened within {_OPEN_TIMEOUT_S:g} s."
            ) from None
        if channel.ended and not self.server_channel.ended:
            raise ResourceError("Another stream to the sandbox was opened, and ended at once.")
        return channel

    def stop(self) -> None:
        """Stop reading all channels."""
        for channel in self:
            channel.stop()

    async def close_others(self) -> None:
        """Close all channels but the server's."""
        others, self._others = self._others, []
        await asyncio.gather(*(channel.close() for channel in others))

    async def close(self) -> None:
        """Close all channels."""
        await self.close_others()
        await self.server_channel.close()

    async def _close_lingering(self) -> None:
        lingering = [channel for channel in self._others if channel.has_lingering_writer]
        for channel in lingering[: max(0, len(lingering) - _MAX_LINGERING + 1)]:
            self._others.remove(channel)
            await channel.close()

    def _closed(self, channel: Channel) -> None:
        if channel is self.server_channel:
            self._main_closed()
            return
        if channel in self._others:
            self._others.remove(channel)
        if channel.command is not None:
            self._abandoned(channel.command)

"""Channels: the streams of a shell, of which the keeper's is the first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from agentfly.errors import ResourceError
from agentfly.resources.containers.stream_shell.channel import Channel, Report
from agentfly.resources.containers.stream_shell.running import Running
from agentfly.resources.containers.stream_shell.scripts import Scripts
from agentfly.resources.containers.stream_shell.stream import Stream

_OPEN_PATIENCE_S = 30.0
_HELD = 8  # those that others may still write to, kept open so that printing does not fail for them

Open = Callable[[Sequence[str]], Awaitable[Stream]]
"""Runs a program inside, as the user whose shell it is, with a stream of its own."""


class Channels:
    """Channels for commands, opened when they are needed, and kept for later ones.

    Attributes:
        main: the keeper's.
    """

    def __init__(
        self,
        stream: Stream,
        scripts: Scripts,
        open_stream: Open,
        report: Report,
        main_closed: Callable[[], None],
        abandoned: Callable[[Running], None],
    ) -> None:
        """Begin to read the keeper's stream.

        Args:
            stream: the keeper's.
            scripts: those of the shell.
            open_stream: runs another program inside.
            report: called with what is reported on any of them.
            main_closed: called when the keeper's stream has ended.
            abandoned: called with a command whose stream has ended before it.
        """
        self._scripts = scripts
        self._open = open_stream
        self._report = report
        self._main_closed = main_closed
        self._abandoned = abandoned
        self._others: list[Channel] = []
        self.main = Channel(stream, scripts.mark, report, self._closed)

    def __iter__(self) -> Iterator[Channel]:
        return iter((self.main, *self._others))

    async def take(self, running: Running) -> Channel:
        """A channel that nobody has, for a command.

        Raises:
            ResourceError: another one was needed, and could not be opened.
        """
        for channel in self:
            if channel.free:
                channel.running = running
                return channel
        await self._let_go_of_held()
        try:
            async with asyncio.timeout(_OPEN_PATIENCE_S):
                stream = await self._open(self._scripts.holder())
                channel = Channel(stream, self._scripts.mark, self._report, self._closed)
                channel.running = running
                self._others.append(channel)
                await channel.ready.wait()
        except TimeoutError:
            raise ResourceError(
                f"Another stream to the sandbox could not be opened within {_OPEN_PATIENCE_S:g} s."
            ) from None
        if channel.ended and not self.main.ended:
            raise ResourceError("Another stream to the sandbox was opened, and ended at once.")
        return channel

    def stop(self) -> None:
        """Read none of them any more."""
        for channel in self:
            channel.stop()

    async def close_others(self) -> None:
        """Close all but the keeper's."""
        others, self._others = self._others, []
        await asyncio.gather(*(channel.close() for channel in others))

    async def close(self) -> None:
        """Close all."""
        await self.close_others()
        await self.main.close()

    async def _let_go_of_held(self) -> None:
        held = [channel for channel in self._others if channel.held]
        for channel in held[: max(0, len(held) - _HELD + 1)]:
            self._others.remove(channel)
            await channel.close()

    def _closed(self, channel: Channel) -> None:
        if channel is self.main:
            self._main_closed()
            return
        if channel in self._others:
            self._others.remove(channel)
        if channel.running is not None:
            self._abandoned(channel.running)

"""Channel: a stream whose outputs serve one command at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agentfly.resources.containers.stream_shell.reports import ReportSplitter
from agentfly.resources.containers.stream_shell.running import Running
from agentfly.resources.containers.stream_shell.stream import Stream

_UNASKED_BYTES = 16 * 1024  # after which the reader pauses while no command has the channel
_BUSY_BYTES = 2**20  # after which others get their turn
_DISCARD_PAUSE_S = 0.02

Report = Callable[["Channel", int, str, list[str]], None]


class Channel:
    """Reads what comes out of a stream: reports, which begin with a mark, and what commands print.

    What comes while no command has the channel is thrown away, at leisure, so that whoever prints it does not fail and
    holds nothing up. Whoever has the outputs open can make up reports as well; that is the agent's loss alone.

    Attributes:
        holder: the process, inside, that has the outputs open for commands; 0 for the shell's keeper.
        held: whether somebody of an earlier command may still write to it.
        running: the command that has it.
    """

    def __init__(self, stream: Stream, mark: bytes, report: Report, closed: Callable[[Channel], None]) -> None:
        """Begin to read.

        Args:
            stream: what to read, and to close.
            mark: what reports begin with.
            report: called with each report: this, the output it came on, its first word and its others.
            closed: called when the stream has ended.
        """
        self.holder = 0
        self.held = False
        self.running: Running | None = None
        self.ready = asyncio.Event()  # it can serve commands, or has ended
        self.ended = False
        self._stream = stream
        self._report = report
        self._closed = closed
        self._splitters = {1: ReportSplitter(mark), 2: ReportSplitter(mark)}
        self._reader = asyncio.create_task(self._read())

    @property
    def free(self) -> bool:
        """Whether it can serve a command."""
        return self.ready.is_set() and self.running is None and not self.held and not self.ended

    async def write(self, data: bytes) -> None:
        """Give the program its input.

        Raises:
            OSError: it takes none any more.
        """
        await self._stream.write(data)

    async def close(self) -> None:
        """Let go of it."""
        self._reader.cancel()
        await asyncio.wait({self._reader})
        with contextlib.suppress(OSError):
            await self._stream.close()

    def stop(self) -> None:
        """Read no more: what comes is not to be heeded."""
        self.ended = True
        self._reader.cancel()

    async def _read(self) -> None:
        try:
            at_once = 0
            while not self.ended and (piece := await self._stream.read()) is not None:
                output, data = piece
                self._take(output, data)
                at_once += len(data)
                if self.running is None and at_once > _UNASKED_BYTES:
                    at_once = 0
                    await asyncio.sleep(_DISCARD_PAUSE_S)
                elif at_once > _BUSY_BYTES:
                    at_once = 0
                    await asyncio.sleep(0)
        except OSError:
            pass  # the way to it is broken, which is its end
        finally:
            self.ended = True
            self.ready.set()
            self._closed(self)

    def _take(self, output: int, data: bytes) -> None:
        for piece in self._splitters[output].split(data):
            if self.ended:
                return
            if isinstance(piece, list):
                word, *words = piece
                self._report(self, output, word, words)
            elif self.running is not None:
                self.running.add(output, piece)

"""Channel: a stream whose outputs serve one command at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agentfly.resources.containers.stream_shell.running import Running
from agentfly.resources.containers.stream_shell.stream import Stream

_LONGEST_REPORT = 16384
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
        self._mark = mark
        self._report = report
        self._closed = closed
        self._buffers = {1: b"", 2: b""}
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

    async def _read(self) -> None:
        try:
            at_once = 0
            while (piece := await self._stream.read()) is not None:
                output, data = piece
                self._take(output, data)
                at_once += len(data)
                if self.running is None and at_once > _LONGEST_REPORT:
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
        data = self._buffers[output] + data
        while (start := data.find(self._mark)) >= 0:
            end = data.find(b"\n", start)
            if end < 0 and len(data) - start < _LONGEST_REPORT:
                break
            self._print(output, data[:start])
            if end < 0:  # one that nobody of ours wrote
                self._print(output, data[start : start + 1])
                data = data[start + 1 :]
                continue
            word, *words = data[start + len(self._mark) : end].decode("ascii", "replace").split(" ")
            self._report(self, output, word, words)
            data = data[end + 1 :]
        if start < 0:
            kept = _overlap(data, self._mark)
            self._print(output, data[: len(data) - kept])
            data = data[len(data) - kept :]
        else:
            self._print(output, data[:start])
            data = data[start:]
        self._buffers[output] = data

    def _print(self, output: int, data: bytes) -> None:
        if data and self.running is not None:
            self.running.add(output, data)


def _overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of a mark."""
    start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(data[start:]):
            return len(data) - start
        start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1), start)
    return 0

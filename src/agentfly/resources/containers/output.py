"""BoundedOutput: what is kept of the output of a command."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class BoundedOutput:
    """Bytes of which the head and the tail are kept, in bounded memory, and the rest is counted."""

    __slots__ = ("_head", "_head_limit", "_sink", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int, sink: Callable[[bytes], None] | None = None) -> None:
        """Keep at most `limit` bytes, half of them from each end; or none, if there is a sink that takes all."""
        self._sink = sink
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Take what came next."""
        self.total += len(chunk)
        if self._sink is not None:
            self._sink(chunk)
            return
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_limit + 4096:  # cut now and then, not at each chunk
            self._cut()

    def _cut(self) -> None:
        del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def omitted(self) -> int:
        """Bytes that were left out."""
        too_many = self.total - self._head_limit - self._tail_limit
        return too_many if too_many > 0 and self._sink is None else 0

    @property
    def kept(self) -> bytes:
        """The bytes kept, head and tail together."""
        if len(self._tail) > self._tail_limit:
            self._cut()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """The bytes kept as text, with a line in place of what was left out."""
        if not self.total:
            return ""
        if not self.omitted:
            return self.kept.decode("utf-8", "replace")
        self._cut()
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(
            bytes(self._head)
        )  # no half character at the cut
        tail = bytes(self._tail)
        start = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
        return f"{head}\n[... {self.omitted + start} bytes left out ...]\n{tail[start:].decode('utf-8', 'replace')}"

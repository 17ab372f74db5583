"""CommandResult: what a command did; and the bounded capture of its output."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandResult:
    """What a command printed and how it ended. As text it is an observation that a model can act on.

    Args:
        exit_code: the command's own; 128 + n if signal n ended it; 124 if it ran out of time.
        stdout: what it printed. Bytes that are not UTF-8 are replaced. Where it was too long, its head and its tail,
            with a line between them that says how much was left out.
        stderr: the same of its error output.
        truncated: whether something was left out of either.
        timed_out: whether it was killed because it ran out of time.
        killed_by: ``"timeout"``, ``"memory"`` (it, or a process of it, went over the memory limit), ``"SIGKILL"``
            (by something else), or None.
        omitted: bytes left out of both outputs.
        timeout: seconds that it was allowed.
        note: what the session lost because of it, for people and models; empty if nothing.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False
    timed_out: bool = False
    killed_by: str | None = None
    omitted: int = 0
    timeout: float | None = None
    note: str = ""

    def __str__(self) -> str:
        parts = [text.rstrip("\n") for text in (self.stdout, self.stderr) if text.strip("\n")]
        ending = self._ending()
        if ending:
            parts.append(f"[{ending}]")
        if self.note:
            parts.append(f"[{self.note}]")
        return "\n".join(parts) or "[no output]"

    def _ending(self) -> str:
        if self.timed_out:
            return f"killed after {self.timeout:g} s" if self.timeout is not None else "killed: out of time"
        if self.killed_by == "memory":
            return f"killed, probably out of memory; exit code {self.exit_code}"
        if self.killed_by == "SIGKILL":
            return f"killed, perhaps out of memory; exit code {self.exit_code}"
        return f"exit code {self.exit_code}" if self.exit_code else ""


class BoundedOutput:
    """Bytes of which the head and the tail are kept, in bounded memory, and the rest is counted."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` bytes, half of them from each end."""
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Take what came next."""
        self.total += len(chunk)
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
        return max(0, self.total - self._head_limit - self._tail_limit)

    @property
    def kept(self) -> bytes:
        """The bytes kept, head and tail together."""
        if len(self._tail) > self._tail_limit:
            self._cut()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """The bytes kept as text, with a line in place of what was left out."""
        if not self.omitted:
            return self.kept.decode("utf-8", "replace")
        self._cut()
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(
            bytes(self._head)
        )  # no half character at the cut
        tail = bytes(self._tail)
        start = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
        return f"{head}\n[... {self.omitted + start} bytes left out ...]\n{tail[start:].decode('utf-8', 'replace')}"

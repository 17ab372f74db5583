"""BoundedOutput: what is kept of the output of a command.

Command: what to run in a sandbox, TimeLimit: how long it may take, and Outcome: how it ended.

CommandResult: what a command did, as a tool and a model see it.
"""

from __future__ import annotations

import asyncio
import codecs
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType

from agentfly.core.errors import ToolError, UsageError, type_of
from agentfly.resources.containers.terminal_output import render_terminal_output


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
            self._trim()

    def _trim(self) -> None:
        del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def omitted(self) -> int:
        """Bytes that were left out."""
        too_many = self.total - self._head_limit - self._tail_limit
        return too_many if too_many > 0 and self._sink is None else 0

    @property
    def data(self) -> bytes:
        """The bytes kept, head and tail together."""
        if len(self._tail) > self._tail_limit:
            self._trim()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """The bytes kept as text, with a line in place of what was left out."""
        if not self.total:
            return ""
        if not self.omitted:
            return self.data.decode("utf-8", "replace")
        self._trim()
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(
            bytes(self._head)
        )  # no half character at the cut
        tail = bytes(self._tail)
        start = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
        return f"{head}\n[... {self.omitted + start} bytes left out ...]\n{tail[start:].decode('utf-8', 'replace')}"


@dataclass(frozen=True)
class Command:
    """What to run, and how.

    Args:
        source: bash source, of any number of lines.
        new_process: whether to run it in a process of its own, which neither sees nor changes the session.
        cwd: the directory for this command alone.
        env: variables for this command alone.
        stdin: what it can read; None means that it finds the end of its input at once.
        max_output: bytes kept of each of its two outputs.
        user: who is to run it, which is for those that have a process of their own; None for the spec's user.
        stdout_sink: takes its output, whole, in place of what is kept of it; None to keep it.
    """

    source: bytes
    new_process: bool
    cwd: str | None
    env: Mapping[str, str]
    stdin: bytes | None
    max_output: int
    user: str | None = None
    stdout_sink: Callable[[bytes], None] | None = None

    def output_buffers(self) -> tuple[BoundedOutput, BoundedOutput]:
        """What collects its output and its error output."""
        return BoundedOutput(self.max_output, self.stdout_sink), BoundedOutput(self.max_output)

    @property
    def prelude(self) -> bytes:
        """Bash source that comes before the command, in a subshell with it; empty if there is none."""
        if self.cwd is None and not self.env:
            return b""
        steps = [] if self.cwd is None else [f"cd -- {shlex.quote(self.cwd)} || exit"]
        steps += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "; ".join(steps).encode("utf-8", "surrogateescape")


class TimeLimit:
    """The time that a command may take, which stands still while its sandbox is frozen."""

    def __init__(self, expired: Callable[[], None], *, paused: bool) -> None:
        """Make one that has not begun.

        Args:
            expired: called when the time is up.
            paused: whether the sandbox is frozen.
        """
        self._expired = expired
        self._paused = paused
        self._left_s: float | None = None  # None: it has not begun, or has ended
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Allow so many seconds, from now or from the next `resume` on."""
        self._left_s = seconds
        self._count()

    def pause(self) -> None:
        """The sandbox is about to be frozen."""
        self._paused = True
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._stop()

    def resume(self) -> None:
        """The sandbox goes on."""
        self._paused = False
        self._count()

    def end(self) -> None:
        """Allow any time from now on."""
        self._left_s = None
        self._stop()

    def _count(self) -> None:
        if self._timer is None and self._left_s is not None and not self._paused:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._expired)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(frozen=True)
class CommandOutcome:
    """How a command ended.

    Args:
        exit_code: as the shell says it; 124 if the command ran out of time.
        stdout: its output.
        stderr: its error output.
        timed_out: whether it was killed because it ran out of time.
        out_of_memory: whether a process of the sandbox was killed over its memory limit meanwhile.
        note: what the session lost because of it; empty if nothing.
    """

    exit_code: int
    stdout: BoundedOutput
    stderr: BoundedOutput
    timed_out: bool = False
    out_of_memory: bool = False
    note: str = ""


def require_type(name: str, value: object, kind: type | UnionType, cure: str, *, of: str = "run") -> None:
    """Refuse an argument of a method of `Container` that is not of a type.

    Raises:
        UsageError: it is of another. The message does not have its value, which may be a secret.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{of}({name}=…) was given {type_of(value)}: write {cure}.")


def encode_shell_word(text: str, what: str) -> bytes:
    """A text as a word of the shell.

    Raises:
        ToolError: it cannot be one. The message begins with `what` it is.
    """
    if "\0" in text:
        raise ToolError(
            f"{what} holds a NUL character at position {text.index(chr(0))}, which cannot be. Leave it out."
        )
    return encode_text(text, what)


def encode_text(text: str, what: str) -> bytes:
    """A text as bytes; a name that is not UTF-8 is written as `os.fsdecode` does it.

    Raises:
        ToolError: it has none. The message begins with `what` it is.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolError(
            f"{what} holds half a character (a lone surrogate) at position {error.start}. Leave it out."
        ) from None


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
        raw: whether it reads as text as it was printed. Else as a terminal shows it, with carriage returns and control
            sequences applied (see `agentfly.resources.containers.terminal_output`); ``stdout`` and ``stderr`` always hold what was printed.
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
    raw: bool = False

    def __str__(self) -> str:
        printed = [text if self.raw else render_terminal_output(text) for text in (self.stdout, self.stderr)]
        parts = [text.rstrip("\n") for text in printed if text.strip("\n")]
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
            return f"killed by SIGKILL; exit code {self.exit_code}"
        return f"exit code {self.exit_code}" if self.exit_code else ""

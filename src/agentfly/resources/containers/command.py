"""Command, its time limit, its bounded output, and its result."""

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
    """Keeps the head and the tail of an output in bounded memory, and counts the rest."""

    __slots__ = ("_head", "_head_limit", "_sink", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int, sink: Callable[[bytes], None] | None = None) -> None:
        """Create an empty buffer.

        Args:
            limit: bytes to keep, half from the start and half from the end.
            sink: receives every chunk, and then nothing is kept; None to keep the output.
        """
        self._sink = sink
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Append a chunk."""
        self.total += len(chunk)
        if self._sink is not None:
            self._sink(chunk)
            return
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_limit + 4096:  # trim occasionally, not at each chunk
            self._trim()

    def _trim(self) -> None:
        del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def omitted(self) -> int:
        """The number of omitted bytes."""
        too_many = self.total - self._head_limit - self._tail_limit
        return too_many if too_many > 0 and self._sink is None else 0

    @property
    def data(self) -> bytes:
        """The kept bytes: head and tail."""
        if len(self._tail) > self._tail_limit:
            self._trim()
        return bytes(self._head + self._tail)

    def text(self) -> str:
        """Return the kept bytes as text, with a line in place of the omitted part."""
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
    """A command and its options.

    Args:
        source: bash source, of any number of lines.
        new_process: whether to run it in a new process, which neither sees nor changes the session.
        cwd: the directory for this command alone.
        env: variables for this command alone.
        stdin: its input; None for an empty input.
        max_output: bytes kept of each output.
        user: the user that runs it, for a command in a new process; None for the spec's user.
        stdout_sink: receives the whole stdout, which is then not kept; None to keep it.
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
        """Return buffers for its stdout and its stderr."""
        return BoundedOutput(self.max_output, self.stdout_sink), BoundedOutput(self.max_output)

    @property
    def prelude(self) -> bytes:
        """Bash source that precedes the command in the same subshell; empty if ``cwd`` and ``env`` are not given."""
        if self.cwd is None and not self.env:
            return b""
        steps = [] if self.cwd is None else [f"cd -- {shlex.quote(self.cwd)} || exit"]
        steps += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "; ".join(steps).encode("utf-8", "surrogateescape")


class TimeLimit:
    """The time limit of a command. It does not run while the sandbox is frozen."""

    def __init__(self, expired: Callable[[], None], *, paused: bool) -> None:
        """Create a limit that is not running yet.

        Args:
            expired: called when the time is up.
            paused: whether the sandbox is frozen.
        """
        self._expired = expired
        self._paused = paused
        self._left_s: float | None = None  # None: not begun, or ended
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Allow `seconds` from now, or from the next `resume` if paused."""
        self._left_s = seconds
        self._count()

    def pause(self) -> None:
        """Pause the limit. Call this before the sandbox is frozen."""
        self._paused = True
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._stop()

    def resume(self) -> None:
        """Resume the limit. Call this after the sandbox was thawed."""
        self._paused = False
        self._count()

    def end(self) -> None:
        """Remove the limit."""
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
    """The outcome of a command.

    Args:
        exit_code: the exit code that the shell reports; 124 if the command timed out.
        stdout: its standard output.
        stderr: its standard error.
        timed_out: whether it was killed because it timed out.
        out_of_memory: whether the kernel killed a process of the sandbox at the memory limit during the command.
        note: the state that the session lost because of the command; empty if none.
    """

    exit_code: int
    stdout: BoundedOutput
    stderr: BoundedOutput
    timed_out: bool = False
    out_of_memory: bool = False
    note: str = ""


def require_type(name: str, value: object, kind: type | UnionType, cure: str, *, of: str = "run") -> None:
    """Check the type of an argument of a method of `Container`.

    Raises:
        UsageError: it has another type. The message omits the value, which may be a secret.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{of}({name}=…) was given {type_of(value)}: write {cure}.")


def encode_shell_word(text: str, what: str) -> bytes:
    """Encode a text that is passed to the shell as one word.

    Raises:
        ToolError: it contains NUL or cannot be encoded. The message begins with `what`.
    """
    if "\0" in text:
        raise ToolError(
            f"{what} holds a NUL character at position {text.index(chr(0))}, which cannot be. Leave it out."
        )
    return encode_text(text, what)


def encode_text(text: str, what: str) -> bytes:
    """Encode a text as UTF-8. Names that `os.fsdecode` decoded from other bytes get those bytes back.

    Raises:
        ToolError: it contains a lone surrogate. The message begins with `what`.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolError(
            f"{what} holds half a character (a lone surrogate) at position {error.start}. Leave it out."
        ) from None


@dataclass(frozen=True)
class CommandResult:
    """The output of a command and how it ended. ``str()`` of it is an observation for a model.

    Args:
        exit_code: the exit code of the command; 128 + n if signal n ended it; 124 if it timed out.
        stdout: its standard output. Bytes that are not UTF-8 are replaced. An output over the limit is cut to its head
            and tail, with a line between them that counts the omitted bytes.
        stderr: its standard error, in the same form.
        truncated: whether stdout or stderr was cut.
        timed_out: whether it was killed because it timed out.
        killed_by: ``"timeout"``, ``"memory"`` (the command or a process of it exceeded the memory limit), ``"SIGKILL"``
            (sent by something else), or None.
        omitted: bytes omitted from stdout and stderr together.
        timeout: the time limit in seconds.
        note: the state that the session lost because of the command, for people and models; empty if none.
        raw: whether ``str()`` has the output as printed. Otherwise ``str()`` has it as a terminal shows it, with
            carriage returns and control sequences applied (see `terminal_output`). ``stdout`` and ``stderr`` are always
            as printed.
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

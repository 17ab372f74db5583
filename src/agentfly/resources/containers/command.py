"""Command: what to run in a sandbox, TimeLimit: how long it may take, and Outcome: how it ended."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType

from agentfly.errors import ToolError, UsageError, type_of
from agentfly.resources.containers.output import BoundedOutput


@dataclass(frozen=True)
class Command:
    """What to run, and how.

    Args:
        source: bash source, of any number of lines.
        own_process: whether to run it in a process of its own, which neither sees nor changes the session.
        cwd: the directory for this command alone.
        env: variables for this command alone.
        stdin: what it can read; None means that it finds the end of its input at once.
        max_output: bytes kept of each of its two outputs.
        user: who is to run it, which is for those that have a process of their own; None for the spec's user.
        sink: takes its output, whole, in place of what is kept of it; None to keep it.
    """

    source: bytes
    own_process: bool
    cwd: str | None
    env: Mapping[str, str]
    stdin: bytes | None
    max_output: int
    user: str | None = None
    sink: Callable[[bytes], None] | None = None

    def outputs(self) -> tuple[BoundedOutput, BoundedOutput]:
        """What collects its output and its error output."""
        return BoundedOutput(self.max_output, self.sink), BoundedOutput(self.max_output)

    @property
    def preparation(self) -> bytes:
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
class Outcome:
    """How a command ended.

    Args:
        exit_code: as the shell says it; 124 if the command ran out of time.
        stdout: its output.
        stderr: its error output.
        timed_out: whether it was killed because it ran out of time.
        out_of_memory: whether a process of the sandbox was killed over its memory limit meanwhile.
        lost: what the session lost because of it; empty if nothing.
    """

    exit_code: int
    stdout: BoundedOutput
    stderr: BoundedOutput
    timed_out: bool = False
    out_of_memory: bool = False
    lost: str = ""


def require_type(name: str, value: object, kind: type | UnionType, cure: str, *, of: str = "run") -> None:
    """Refuse an argument of a method of `Container` that is not of a type.

    Raises:
        UsageError: it is of another. The message does not have its value, which may be a secret.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{of}({name}=…) was given {type_of(value)}: write {cure}.")


def shell_word(text: str, what: str) -> bytes:
    """A text as a word of the shell.

    Raises:
        ToolError: it cannot be one. The message begins with `what` it is.
    """
    if "\0" in text:
        raise ToolError(
            f"{what} holds a NUL character at position {text.index(chr(0))}, which cannot be. Leave it out."
        )
    return encoded(text, what)


def encoded(text: str, what: str) -> bytes:
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

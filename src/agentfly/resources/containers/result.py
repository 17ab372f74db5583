"""CommandResult: what a command did, as a tool and a model see it."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.terminal import shown


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
            sequences applied (see `agentfly.terminal`); ``stdout`` and ``stderr`` always hold what was printed.
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
        printed = [text if self.raw else shown(text) for text in (self.stdout, self.stderr)]
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

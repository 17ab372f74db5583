"""Command: one command on its way through the shell of a sandbox, from what was asked to how it ended."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from agentfly.resources.containers.output import BoundedOutput
from agentfly.resources.containers.pipes import OutputPipes


@dataclass(frozen=True)
class Request:
    """What to run, and how.

    Args:
        command: bash source, of any number of lines.
        own_process: whether to run it in a process of its own, which neither sees nor changes the session.
        cwd: the directory for this command alone.
        env: variables for this command alone.
        stdin: what it can read; None means nothing.
        max_output: bytes kept of each of its two outputs.
    """

    command: bytes
    own_process: bool
    cwd: str | None
    env: Mapping[str, str]
    stdin: bytes | None
    max_output: int

    @property
    def preparation(self) -> bytes:
        """Bash source that comes before the command, in a subshell with it; empty if there is none."""
        steps = [] if self.cwd is None else [f"cd -- {shlex.quote(self.cwd)} || exit"]
        steps += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "; ".join(steps).encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Args:
        exit_code: as the shell says it.
        stdout: its output.
        stderr: its error output.
        timed_out: whether it was killed because it ran out of time.
        lost: what the session lost because of it; empty if nothing.
    """

    exit_code: int
    stdout: BoundedOutput
    stderr: BoundedOutput
    timed_out: bool
    lost: str


class Command:
    """A command under way."""

    def __init__(self, name: str, request: Request, pipes: OutputPipes) -> None:
        """Take what was asked, and begin to collect what it will print.

        Args:
            name: by which the shell knows it.
            request: what was asked.
            pipes: its outputs.
        """
        self.name = name
        self.own_process = request.own_process
        self.before: set[int] = set()  # processes that were there already, which its end must not touch
        self.begun = False
        self.process = 0  # its process id inside, if it has one of its own
        self.lost = ""
        self.ended = asyncio.Event()
        self.waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # None: out of time
        self.pipes = pipes
        self.stdout, self.stderr = pipes.begin(request.max_output)

    def finish(self, exit_code: int) -> None:
        """It has ended."""
        self.ended.set()
        if not self.waiter.done():
            self.waiter.set_result(exit_code)

    def expire(self) -> None:
        """It has run out of time."""
        if not self.waiter.done():
            self.waiter.set_result(None)

    def outcome(self, exit_code: int | None) -> Outcome:
        """How it ended; an exit code of None means that it ran out of time."""
        timed_out = exit_code is None
        return Outcome(124 if exit_code is None else exit_code, self.stdout, self.stderr, timed_out, self.lost)

"""Code that both shells of sandboxes share: running commands, and the limit on reports from a sandbox.

`bubblewrap/shell.py` is the shell with named pipes, `stream_shell/shell.py` the one with streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from agentfly.core.errors import SandboxFlooded
from agentfly.resources.containers.command import Command, CommandOutcome, TimeLimit

PRINT_STATE_SCRIPT = Path(__file__).with_name("print_state.sh")
"""A bash function of both sessions. It prints the session's state, for the session that follows it."""


class PendingCommand:
    """A command from its request to its outcome.

    Attributes:
        number: the number by which the shell identifies the command.
        new_process: whether it runs in its own process instead of the session.
        started: whether the shell has reported its start.
        note: a message for the caller beside the output, for instance about lost variables.
        exit_code: None until the command has ended.
        expired: whether its time limit was reached.
        time: the time limit, which does not run while the sandbox is frozen.
    """

    def __init__(self, number: int, command: Command, *, frozen: bool) -> None:
        """Create the command and its output buffers.

        Args:
            number: the number by which the shell knows the command.
            command: what to run.
            frozen: whether the sandbox is frozen.
        """
        self.number = number
        self.new_process = command.new_process
        self.started = False
        self.note = ""
        self.exit_code: int | None = None
        self.expired = False
        self.stdout, self.stderr = command.output_buffers()
        self.time = TimeLimit(lambda: self._wake(None), paused=frozen)
        self._result: asyncio.Future[int | None] | None = None  # what the caller awaits
        self._ended: asyncio.Event | None = None  # for others than the caller

    async def wait(self, timeout: float) -> int | None:
        """Wait for the end, at most `timeout` seconds; return the exit code, or None if the time is up."""
        if self.exit_code is not None:
            return self.exit_code
        self._result = asyncio.get_running_loop().create_future()
        self.time.begin(timeout)
        try:
            exit_code = await self._result
        finally:
            self.time.end()
        self.expired = exit_code is None
        return exit_code

    def finish(self, exit_code: int) -> None:
        """Record the end. Later calls change nothing."""
        if self.exit_code is None:
            self.exit_code = exit_code
            if self._ended is not None:
                self._ended.set()
            self._wake(exit_code)

    async def ended(self) -> None:
        """Return when the command has ended, even if that is after its time limit."""
        if self.exit_code is None:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()

    def outcome(self, exit_code: int | None, *, out_of_memory: bool = False) -> CommandOutcome:
        """Return the outcome.

        Args:
            exit_code: the result of `wait`; None means that the time was up.
            out_of_memory: whether the kernel killed processes of the command for memory.
        """
        code, timed_out = (124, True) if exit_code is None else (exit_code, False)
        return CommandOutcome(
            code, self.stdout, self.stderr, timed_out=timed_out, out_of_memory=out_of_memory, note=self.note
        )

    def _wake(self, exit_code: int | None) -> None:
        if self._result is not None and not self._result.done():
            self._result.set_result(exit_code)


def flooded_error() -> SandboxFlooded:
    """Return the error of a sandbox that was stopped because its processes flooded its shell."""
    return SandboxFlooded(
        "The sandbox was stopped, because processes in it flooded the channels of its shell. It runs no more commands, "
        "and its files are lost."
    )


class FloodLimiter:
    """A token bucket for the reports of a sandbox. Time and requests refill it.

    A shell reports little: a few words per command, and a few more when a part of it restarts after a kill. A sandbox
    that exceeds the limit is treated as an attack on the host.
    """

    def __init__(
        self, least: float, *, per_second: float, per_request: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with `least` tokens. Time refills the bucket up to that; requests fill it up to four times that.

        Args:
            least: the initial number of tokens.
            per_second: tokens added per second.
            per_request: tokens added per request.
            clock: returns the time in seconds.
        """
        self._least, self._most = least, 4 * least
        self._per_second, self._per_request = per_second, per_request
        self._clock = clock
        self._left = least
        self._refilled = clock()

    def add_request(self) -> None:
        """Add the tokens of one request, which the sandbox may answer."""
        if self._left < self._most:
            self._left = min(self._left + self._per_request, self._most)

    def spend(self, amount: float) -> bool:
        """Spend an amount. Return False if there are too few tokens."""
        if amount > self._left:  # the clock is read only if it matters, because this runs for each command
            now = self._clock()
            grown = min(self._left + (now - self._refilled) * self._per_second, self._least)
            self._left, self._refilled = max(self._left, grown), now
        self._left -= amount
        return self._left >= 0

"""PipeCommand: a command in a bubblewrap sandbox's shell, from request to outcome."""

from __future__ import annotations

import asyncio

from agentfly.resources.containers.bubblewrap.shell_io import OutputPipes
from agentfly.resources.containers.command import Command, CommandOutcome, TimeLimit


class PipeCommand:
    """A command under way."""

    def __init__(
        self, name: int, command: Command, pipes: OutputPipes, before: frozenset[int], *, frozen: bool
    ) -> None:
        """Take what was asked, and begin to collect what it will print.

        Args:
            name: by which the shell knows it.
            command: what was asked.
            pipes: its outputs.
            before: the processes that are there already, which its end must not touch.
            frozen: whether the sandbox is.

        Raises:
            OSError: this process has too many files open.
        """
        self.name = name
        self.new_process = command.new_process
        self.before = before
        self.connections = (0, 0)  # the numbers of its pipes and of its input; 0 if it has none
        self.begun = False  # known of those with a process of their own
        self.process = 0  # its process id inside, if it has one of its own
        self.lost = ""
        self.exit_code: int | None = None  # None: it has not ended
        self.expired = False  # it has run out of time
        self.pipes = pipes
        self.stdout, self.stderr = command.output_buffers()
        self._waiter: asyncio.Future[int | None] | None = None
        self.time = TimeLimit(lambda: self._wake(None), paused=frozen)
        self._end: asyncio.Event | None = None  # for those who wait for the end without being its caller
        pipes.start(self.stdout, self.stderr)

    async def end(self, timeout: float) -> int | None:
        """Wait for its end, at most `timeout` seconds; None if it has run out of them."""
        if self.exit_code is not None:
            return self.exit_code
        self._waiter = asyncio.get_running_loop().create_future()
        self.time.begin(timeout)
        try:
            exit_code = await self._waiter
        finally:
            self.time.end()
        self.expired = exit_code is None
        return exit_code

    def finish(self, exit_code: int) -> None:
        """It has ended."""
        if self.exit_code is None:
            self.exit_code = exit_code
            if self._end is not None:
                self._end.set()
            self._wake(exit_code)

    async def ended(self) -> None:
        """Return when it has ended."""
        if self.exit_code is None:
            self._end = self._end or asyncio.Event()
            await self._end.wait()

    def outcome(self, exit_code: int | None) -> CommandOutcome:
        """How it ended; an exit code of None means that it ran out of time."""
        code, timed_out = (124, True) if exit_code is None else (exit_code, False)
        return CommandOutcome(code, self.stdout, self.stderr, timed_out=timed_out, note=self.lost)

    def _wake(self, exit_code: int | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(exit_code)

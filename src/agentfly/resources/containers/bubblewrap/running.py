"""Running: a command on its way through the shell of a sandbox."""

from __future__ import annotations

import asyncio

from agentfly.resources.containers.bubblewrap.pipes import OutputPipes
from agentfly.resources.containers.command import Command, Outcome


class Running:
    """A command under way."""

    def __init__(self, name: int, command: Command, pipes: OutputPipes, before: frozenset[int]) -> None:
        """Take what was asked, and begin to collect what it will print.

        Args:
            name: by which the shell knows it.
            command: what was asked.
            pipes: its outputs.
            before: the processes that are there already, which its end must not touch.

        Raises:
            OSError: this process has too many files open.
        """
        self.name = name
        self.own_process = command.own_process
        self.before = before
        self.connections = (0, 0)  # the numbers of its pipes and of its input; 0 if it has none
        self.begun = False  # known of those with a process of their own
        self.process = 0  # its process id inside, if it has one of its own
        self.lost = ""
        self.exit_code: int | None = None  # None: it has not ended
        self.expired = False  # it has run out of time
        self.pipes = pipes
        self.stdout, self.stderr = command.outputs()
        self._waiter: asyncio.Future[int | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0.0  # seconds that it may still take
        self._end: asyncio.Event | None = None  # for those who wait for the end without being its caller
        pipes.begin(self.stdout, self.stderr)

    async def end(self, timeout: float) -> int | None:
        """Wait for its end, at most `timeout` seconds; None if it has run out of them."""
        if self.exit_code is not None:
            return self.exit_code
        self._waiter = asyncio.get_running_loop().create_future()
        self._left = timeout
        self.start_clock()
        try:
            exit_code = await self._waiter
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self.expired = exit_code is None
        return exit_code

    def start_clock(self) -> None:
        """Count what is left of the time that it may take, if somebody waits for its end."""
        if self._timer is None and self._waiter is not None and not self._waiter.done():
            self._timer = asyncio.get_running_loop().call_later(self._left, self._wake, None)

    def stop_clock(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._left = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

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

    def outcome(self, exit_code: int | None) -> Outcome:
        """How it ended; an exit code of None means that it ran out of time."""
        code, timed_out = (124, True) if exit_code is None else (exit_code, False)
        return Outcome(code, self.stdout, self.stderr, timed_out=timed_out, lost=self.lost)

    def _wake(self, exit_code: int | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(exit_code)

"""Running: a command on its way through the shell of a sandbox."""

from __future__ import annotations

import asyncio

from agentfly.resources.containers.bubblewrap.pipes import OutputPipes
from agentfly.resources.containers.command import Command, Outcome


class Running:
    """A command under way."""

    def __init__(self, name: str, command: Command, pipes: OutputPipes) -> None:
        """Take what was asked, and begin to collect what it will print.

        Args:
            name: by which the shell knows it.
            command: what was asked.
            pipes: its outputs.
        """
        self.name = name
        self.own_process = command.own_process
        self.before: set[int] = set()  # processes that were there already, which its end must not touch
        self.begun = False
        self.process = 0  # its process id inside, if it has one of its own
        self.lost = ""
        self.ended = asyncio.Event()
        self.waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # None: out of time
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0.0  # seconds that it may still take
        self.pipes = pipes
        self.stdout, self.stderr = pipes.begin(*command.outputs())

    def start_clock(self, timeout: float | None = None) -> None:
        """Begin to count, or go on with what was left when the clock was stopped; at the end of it, it has expired."""
        loop = asyncio.get_running_loop()
        self._left = self._left if timeout is None else timeout
        if self._timer is None:
            self._timer = loop.call_later(self._left, self.expire)

    def stop_clock(self) -> None:
        """Stop counting."""
        if self._timer is not None:
            self._left = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

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
        code, timed_out = (124, True) if exit_code is None else (exit_code, False)
        return Outcome(code, self.stdout, self.stderr, timed_out=timed_out, lost=self.lost)

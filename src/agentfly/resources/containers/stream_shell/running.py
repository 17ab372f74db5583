"""Running: a command on its way through a shell."""

from __future__ import annotations

import asyncio

from agentfly.resources.containers.command import Command, Outcome


class Running:
    """A command under way."""

    def __init__(self, number: int, command: Command, file: int) -> None:
        """Take what was asked.

        Args:
            number: by which the shell knows it.
            command: what was asked.
            file: the number of the files that it is put into.
        """
        self.number = number
        self.command = command
        self.own_process = command.own_process
        self.file = file
        self.spared = ""  # children of the session and of process 1 that were there before it
        self.begun = False
        self.sent_again = 0  # times
        self.closing = False  # its end is under way, since what ran it has ended
        self.lost = ""
        self.kills = 0  # by the kernel, for memory, in the sandbox's whole life
        self.stdout, self.stderr = command.outputs()
        self.ended = asyncio.Event()
        self.waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # None: out of time
        self._code: int | None = None
        self._stderr_done = False
        self._timer: asyncio.TimerHandle | None = None
        self._left_s = 0.0

    def add(self, output: int, data: bytes) -> None:
        """It has printed."""
        (self.stdout if output == 1 else self.stderr).add(data)

    def reported(self, output: int, code: int) -> None:
        """Its end was reported on one of its outputs; it has ended when both have been read to there."""
        if output == 1:
            self._code = code
        else:
            self._stderr_done = True
        if self._code is not None and self._stderr_done:
            self.finish(self._code)

    def finish(self, code: int) -> None:
        """It has ended."""
        self.ended.set()
        if not self.waiter.done():
            self.waiter.set_result(code)

    def limit(self, seconds: float) -> None:
        """Give it so many seconds from now on."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def stop_clock(self) -> None:
        """Let its time stand still."""
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

    def start_clock(self) -> None:
        """Let its time go on."""
        if self._timer is None:
            self.limit(self._left_s)

    def outcome(self, code: int | None, kills_before: int) -> Outcome:
        """How it ended; a code of None means that it ran out of time."""
        exit_code, timed_out = (124, True) if code is None else (code, False)
        return Outcome(
            exit_code,
            self.stdout,
            self.stderr,
            timed_out=timed_out,
            out_of_memory=self.kills > kills_before,
            lost=self.lost,
        )

    def _expire(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

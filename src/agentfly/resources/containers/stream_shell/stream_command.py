"""StreamCommand: a command in a stream shell, from request to outcome."""

from __future__ import annotations

import asyncio

from agentfly.resources.containers.command import Command, CommandOutcome, TimeLimit


class StreamCommand:
    """A command under way."""

    def __init__(self, number: int, command: Command, file: int, *, frozen: bool) -> None:
        """Take what was asked.

        Args:
            number: by which the shell knows it.
            command: what was asked.
            file: the number of the files that it is put into.
            frozen: whether the sandbox is.
        """
        self.number = number
        self.command = command
        self.new_process = command.new_process
        self.file = file
        self.spared = ""  # children of the session and of process 1 that were there before it
        self.asked = False  # the sandbox has been told to begin it
        self.begun = False
        self.killing: asyncio.Task[None] | None = None
        self.sent_again = 0  # times
        self.closing = False  # its end is under way, since what ran it has ended
        self.lost = ""
        self.kills = 0  # by the kernel, for memory, in the sandbox's whole life
        self.stdout, self.stderr = command.output_buffers()
        self.ended = asyncio.Event()
        self.waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()  # None: out of time
        self._code: int | None = None
        self._stderr_done = False
        self.time = TimeLimit(self._expire, paused=frozen)

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

    def outcome(self, code: int | None, kills_before: int) -> CommandOutcome:
        """How it ended; a code of None means that it ran out of time."""
        exit_code, timed_out = (124, True) if code is None else (code, False)
        return CommandOutcome(
            exit_code,
            self.stdout,
            self.stderr,
            timed_out=timed_out,
            out_of_memory=self.kills > kills_before,
            note=self.lost,
        )

    def _expire(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

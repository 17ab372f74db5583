"""Exchange: the directory through which commands, their input and their output pass between host and sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
from pathlib import Path

from agentfly.errors import ResourceDied, ResourceError
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.pipes import OutputPipes
from agentfly.resources.containers.command import Command

MAX_LEFT_BEHIND = 8
_AT_ONCE = 64 * 1024  # bytes written on the event loop; more is written aside


class Exchange:
    """The host's side of the directory. The sandbox sees it read-only, but for the pipes."""

    def __init__(self, directory: Path, launcher: Launcher) -> None:
        """Attach to the directory of a sandbox that has been started."""
        self._directory = str(directory)
        self._launcher = launcher
        self._inside = launcher.inside(directory)
        self._files: dict[str, list[str]] = {}  # by command
        self._pipes: dict[int, OutputPipes] = {}  # the one used last comes last
        self._numbers = itertools.count()
        self._closed = False

    def open_starts(self) -> int:
        """The pipe to what starts commands in processes of their own."""
        return os.open(f"{self._directory}/starts", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def place(self, name: str, command: Command, directory: str) -> str:
        """Put down the script of a command, and its input. `remove` takes them away, however far this has come.

        Args:
            name: the command's.
            command: what to run.
            directory: where the session is to go first; empty if nowhere.

        Returns:
            Where its input is, as the sandbox sees it.

        Raises:
            ResourceError: the host has no room for it.
            ResourceDied: the exchange is closed.
        """
        script = command.source
        if before := command.preparation:
            await self._write(name, "cmd", script)
            script = b"( %s; . %s/%s.cmd )" % (before, self._inside.encode(), name.encode())
        if directory:
            script = f"cd -- {shlex.quote(directory)} 2>/dev/null; ".encode("utf-8", "surrogateescape") + script
        await self._write(name, "sh", script)
        if command.stdin is None:
            return "/dev/null"
        await self._write(name, "in", command.stdin)
        return f"{self._inside}/{name}.in"

    def remove(self, name: str) -> None:
        """Take away what was put down for a command: a request that was never read must not run later."""
        for path in self._files.pop(name, []):
            with contextlib.suppress(FileNotFoundError):  # removed with the sandbox
                os.unlink(path)  # noqa: PTH108  (for each command, and pathlib is slow)

    def pipes(self) -> tuple[str, OutputPipes]:
        """Pipes that nobody else can write to, and where the sandbox sees them."""
        number = next((number for number, pipes in self._pipes.items() if pipes.free), None)
        if number is None:
            number = next(self._numbers)
            pipes = OutputPipes(f"{self._directory}/{number}", self._launcher.uid)
        else:
            pipes = self._pipes.pop(number)
        self._pipes[number] = pipes
        return f"{self._inside}/{number}", pipes

    def finish(self, pipes: OutputPipes) -> None:
        """End the collection of a command's output; what it left behind may go on printing, within bounds."""
        pipes.finish()
        left_behind = [number for number, pipes in self._pipes.items() if pipes.left_behind]
        for number in left_behind[:-MAX_LEFT_BEHIND]:
            self._pipes.pop(number).close()

    def close(self) -> None:
        """Stop reading every output, and put nothing down any more."""
        self._closed = True
        for pipes in self._pipes.values():
            pipes.close()
        self._pipes.clear()

    async def _write(self, name: str, suffix: str, content: bytes) -> None:
        if self._closed:
            raise ResourceDied("The sandbox was released or reset while a command was on its way into it.")
        path = f"{self._directory}/{name}.{suffix}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._files.setdefault(name, []).append(path)
            if len(content) <= _AT_ONCE:
                _fill(descriptor, content, self._launcher.uid)
            else:  # if the caller is cancelled, the thread goes on to close the file, which is removed by then
                await asyncio.shield(self._launcher.aside(_fill, descriptor, content, self._launcher.uid))
        except OSError as error:
            raise ResourceError(
                f"The host could not pass {len(content)} bytes into a sandbox by way of {self._directory}: {error}"
            ) from error


def _fill(descriptor: int, content: bytes, owner: int | None) -> None:
    try:
        if owner is not None:
            os.fchown(descriptor, owner, owner)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)

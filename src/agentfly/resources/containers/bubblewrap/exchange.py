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
        self._files: dict[int, list[str]] = {}  # by command
        self._pipes: dict[int, OutputPipes] = {}  # the one used last comes last
        self._numbers = itertools.count()
        self._of_the_session = -1
        self._of_the_session = self._unused()
        self._script = self._create("command")
        self._script_length = 0
        self._closed = False

    def open_starts(self) -> int:
        """The pipe to what starts commands in processes of their own."""
        return os.open(f"{self._directory}/starts", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def place(self, name: int, command: Command, directory: str) -> None:
        """Put down the script of a command, and its input. `remove` takes them away, however far this has come.

        The session's script is always the same file, written anew: it reads it whole before it runs any of it.

        Args:
            name: the command's.
            command: what to run.
            directory: where the session is to go first; empty if nowhere.

        Raises:
            ResourceError: the host has no room for it.
            ResourceDied: the exchange is closed.
        """
        self._check()
        script, before = command.source, command.preparation
        if before or (len(script) > _AT_ONCE and not command.own_process):
            await self._write(name, "cmd", script)
            script = b"builtin . %s/%d.cmd" % (os.fsencode(self._inside), name)
            script = b"( %s; %s )" % (before, script) if before else script
        if directory:
            script = f"cd -- {shlex.quote(directory)} 2>/dev/null; ".encode("utf-8", "surrogateescape") + script
        if command.own_process:
            await self._write(name, "sh", script)
        else:
            self._rewrite(script)
        if command.stdin is not None:
            await self._write(name, "in", command.stdin)

    def remove(self, name: int) -> None:
        """Take away what was put down for a command: a request that was never read must not run later."""
        for path in self._files.pop(name, ()):
            with contextlib.suppress(OSError):  # removed with the sandbox, or will be
                os.unlink(path)  # noqa: PTH108  (for each command, and pathlib is slow)

    def pipes(self) -> tuple[int, OutputPipes]:
        """Pipes that nobody else can write to, and their number."""
        number = self._unused()
        return number, self._pipes[number]

    def session_pipes(self, *, anew: bool) -> tuple[int, OutputPipes]:
        """The pipes that the session holds, and their number.

        Args:
            anew: others than before, because somebody else may hold those too.
        """
        if anew:
            self._of_the_session = self._unused()
        return self._of_the_session, self._pipes[self._of_the_session]

    def finish(self, pipes: OutputPipes) -> None:
        """End the collection of a command's output; what it left behind may go on printing, within bounds."""
        pipes.finish()
        if len(self._pipes) > MAX_LEFT_BEHIND:
            held = self._of_the_session
            left_behind = [number for number, pipes in self._pipes.items() if pipes.left_behind and number != held]
            for number in left_behind[:-MAX_LEFT_BEHIND]:
                self._pipes.pop(number).close()

    def close(self) -> None:
        """Stop reading every output, and put nothing down any more."""
        if self._closed:
            return
        self._closed = True
        os.close(self._script)
        for pipes in self._pipes.values():
            pipes.close()
        self._pipes.clear()

    def _unused(self) -> int:
        """The number of pipes that nobody can write to, and that are not the session's."""
        held = self._of_the_session
        number = next((number for number, pipes in self._pipes.items() if pipes.free and number != held), None)
        if number is None:
            number = next(self._numbers)
            pipes = OutputPipes(f"{self._directory}/{number}", self._launcher.uid)
        else:
            pipes = self._pipes.pop(number)
        self._pipes[number] = pipes
        return number

    def _rewrite(self, script: bytes) -> None:
        """Make `script` the next one of the session."""
        self._check()
        try:
            written = os.pwrite(self._script, script, 0)
            while written < len(script):
                written += os.pwrite(self._script, script[written:], written)
            if written < self._script_length:
                os.ftruncate(self._script, written)
            self._script_length = written
        except OSError as error:
            raise self._no_room(script, error) from error

    async def _write(self, name: int, suffix: str, content: bytes) -> None:
        self._check()
        try:
            descriptor = self._create(f"{name}.{suffix}")
            self._files.setdefault(name, []).append(f"{self._directory}/{name}.{suffix}")
            if len(content) <= _AT_ONCE:
                _fill(descriptor, content)
            else:  # if the caller is cancelled, the thread goes on to close the file, which is removed by then
                await asyncio.shield(self._launcher.aside(_fill, descriptor, content))
        except OSError as error:
            raise self._no_room(content, error) from error

    def _create(self, name: str) -> int:
        """A new file for the sandbox to read."""
        descriptor = os.open(f"{self._directory}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self._launcher.uid is not None:
            os.fchown(descriptor, self._launcher.uid, self._launcher.uid)
        return descriptor

    def _check(self) -> None:
        if self._closed:
            raise ResourceDied("The sandbox was released or reset while a command was on its way into it.")

    def _no_room(self, content: bytes, error: OSError) -> ResourceError:
        return ResourceError(
            f"The host could not pass {len(content)} bytes into a sandbox by way of {self._directory}: {error}"
        )


def _fill(descriptor: int, content: bytes) -> None:
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)

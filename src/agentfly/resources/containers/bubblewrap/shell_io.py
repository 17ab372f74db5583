"""The output and input of commands in a `PipeShell`.

OutputPipes holds the host's ends of a command's output pipes, PipeCommand is a command under way, and ShellDirectory
holds the scripts, the input and the pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import shlex
import stat
from pathlib import Path

from agentfly.core.errors import ResourceDied, ResourceError
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.command import BoundedOutput, Command
from agentfly.resources.containers.shell import PendingCommand

_CHUNK = 65536
_DISCARD_PAUSE_S = 0.02
_DRAIN = 4  # chunks; a pipe holds one, and somebody else may be filling it for ever
_STALE = 32  # chunks; the most that a pipe can be made to hold is half of that


class OutputPipes:
    """The pipes of one command at a time, for stdout and stderr, each read as it fills into a bounded buffer.

    A process that outlives its command may go on printing. That output is read slowly and discarded, so the process
    neither
    fails nor delays anything. Once nobody can write to them any more, the pipes serve the next command. The session's
    pipes
    also serve it again while only the session can write to them.
    """

    def __init__(self, path: str, owner: int | None) -> None:
        """Create the pipes at `path` with ``.out`` and ``.err`` appended.

        Args:
            path: where, on the host.
            owner: the host's user that writes to them; None for this one.
        """
        self._poll = select.poll()
        self._out, self._err = (_PipeReader(path + suffix, owner, self._poll) for suffix in (".out", ".err"))
        self._in_use = False

    def start(self, stdout: BoundedOutput, stderr: BoundedOutput) -> None:
        """Collect the output of the next command. Output that is still in the pipes is discarded.

        Raises:
            OSError: this process has too many files open.
        """
        if self._poll.poll(0):
            self._out.drain(_STALE)
            self._err.drain(_STALE)
        self._in_use = True
        self._open(stdout, stderr)

    def restart(self) -> None:
        """Collect for the same command again, because its first runner has exited and the pipes may be at EOF.

        Raises:
            OSError: this process has too many files open.
        """
        stdout, stderr = self._out.output, self._err.output
        assert stdout is not None
        assert stderr is not None
        self._out.drain(_STALE)
        self._err.drain(_STALE)
        self._open(stdout, stderr)

    def _open(self, stdout: BoundedOutput, stderr: BoundedOutput) -> None:
        try:
            self._out.begin(stdout)
            self._err.begin(stderr)
        except OSError:
            self._out.close()
            self._err.close()
            self._in_use = False
            raise

    def finish(self) -> None:
        """Read what the command wrote before it ended. Later output is discarded."""
        if self._poll.poll(0):
            self._out.drain(_DRAIN)
            self._err.drain(_DRAIN)
        self._out.output = self._err.output = None
        self._in_use = False

    @property
    def free(self) -> bool:
        """Whether their command is finished and nobody can write to them."""
        return not (self._in_use or self._out.reading or self._err.reading)

    @property
    def lingering(self) -> bool:
        """Whether their command is finished, and somebody can still write to them."""
        return not self._in_use and (self._out.reading or self._err.reading)

    def close(self) -> None:
        """Stop reading for good. A process that still writes gets an error."""
        self._out.remove()
        self._err.remove()


class _PipeReader:
    def __init__(self, path: str, owner: int | None, poll: select.poll) -> None:
        os.mkfifo(path, 0o600)
        if owner is not None:
            os.chown(path, owner, owner, follow_symlinks=False)
        self.output: BoundedOutput | None = None
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._poll = poll  # knows the descriptor while there is one
        self._descriptor = -1
        self._pause: asyncio.TimerHandle | None = None

    @property
    def reading(self) -> bool:
        return self._descriptor >= 0

    def begin(self, output: BoundedOutput) -> None:
        self.output = output
        if self._descriptor < 0:
            # reopen it after its writers have left: a newly opened pipe is not at EOF until the next writer has left
            self._descriptor = _open_pipe(self._path)
            self._poll.register(self._descriptor, select.POLLIN)
            self._loop.add_reader(self._descriptor, self._readable)
        elif self._pause is not None:
            self._pause.cancel()
            self._go_on()

    def drain(self, chunks: int) -> None:
        for _ in range(chunks):
            if self._descriptor < 0 or not self._read():
                break

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # gone, or where a sandbox has closed the directory to all
            os.unlink(self._path)  # noqa: PTH108  (who has it open must not write into the next command's)

    def close(self) -> None:
        if self._descriptor >= 0:
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            self._poll.unregister(self._descriptor)
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> bool:
        """Read once; False if there is nothing, or no writer is left."""
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        if self.output is not None:
            self.output.add(chunk)
        return True

    def _readable(self) -> None:
        if self._read() and self.output is None:  # slow down endless output, which would keep the event loop busy
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_DISCARD_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._readable)


def _open_pipe(path: str) -> int:
    """Open a named pipe for reading.

    Raises:
        OSError: the path is something else, or this process has too many files open.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "that is no pipe any more", path)
    return descriptor


class PipeCommand(PendingCommand):
    """A command of a `PipeShell`.

    Attributes:
        pipes: its outputs.
        excluded_pids: processes that were there before the command. Its end must not touch them.
        connections: the numbers of its pipes and of its input; 0 for no input.
        process: the process id inside, if it runs in a process of its own and has started; else 0.
    """

    def __init__(
        self, number: int, command: Command, pipes: OutputPipes, excluded_pids: frozenset[int], *, frozen: bool
    ) -> None:
        """Create the command, and begin to collect its output.

        Raises:
            OSError: this process has too many files open.
        """
        super().__init__(number, command, frozen=frozen)
        self.pipes = pipes
        self.excluded_pids = excluded_pids
        self.connections = (0, 0)
        self.process = 0
        pipes.start(self.stdout, self.stderr)


MAX_LINGERING_PIPES = 8
_AT_ONCE = 64 * 1024  # bytes written on the event loop; more is written aside


class ShellDirectory:
    """The host's side of the shell's directory. The sandbox sees it read-only, except for the pipes."""

    def __init__(self, directory: Path, launcher: Launcher) -> None:
        """Attach to the directory of a started sandbox."""
        self._directory = str(directory)
        self._launcher = launcher
        self._inside = launcher.shell_mount(directory)
        self._files: dict[int, list[str]] = {}  # by command
        self._pipes: dict[int, OutputPipes] = {}  # the one used last comes last
        self._numbers = itertools.count()
        self._of_the_session = -1
        self._of_the_session = self._unused()
        self._script = self._create("command")
        self._script_length = 0
        self._closed = False

    def open_spawn_pipe(self) -> int:
        """Open the pipe to the starter of commands in processes of their own."""
        return os.open(f"{self._directory}/starts", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def write_command(self, name: int, command: Command, directory: str) -> None:
        """Write the script of a command, and its input. `remove_command` removes them, however far this has come.

        The session's script is always the same file. The session reads it whole before it runs any of it.

        Args:
            name: the command's number.
            command: what to run.
            directory: where the session changes to first; empty for nowhere.

        Raises:
            ResourceError: the host has no room for it.
            ResourceDied: the directory is closed.
        """
        self._check()
        script, before = command.source, command.prelude
        if before or (len(script) > _AT_ONCE and not command.new_process):
            await self._write(name, "cmd", script)
            script = b"builtin . %s/%d.cmd" % (os.fsencode(self._inside), name)
            script = b"( %s; %s )" % (before, script) if before else script
        if directory:
            script = f"cd -- {shlex.quote(directory)} 2>/dev/null; ".encode("utf-8", "surrogateescape") + script
        if command.new_process:
            await self._write(name, "sh", script)
        else:
            self._rewrite(script)
        if command.stdin is not None:
            await self._write(name, "in", command.stdin)

    def remove_command(self, name: int) -> None:
        """Remove what was written for a command: a request that was never read must not run later."""
        for path in self._files.pop(name, ()):
            with contextlib.suppress(OSError):  # removed with the sandbox, or will be
                os.unlink(path)  # noqa: PTH108  (for each command, and pathlib is slow)

    def new_pipes(self) -> tuple[int, OutputPipes]:
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

    def finish_output(self, pipes: OutputPipes) -> None:
        """End the collection of a command's output. Processes that it left behind may go on printing, within bounds."""
        pipes.finish()
        if len(self._pipes) > MAX_LINGERING_PIPES:
            held = self._of_the_session
            left_behind = [number for number, pipes in self._pipes.items() if pipes.lingering and number != held]
            for number in left_behind[:-MAX_LINGERING_PIPES]:
                self._pipes.pop(number).close()

    def close(self) -> None:
        """Stop reading every output, and write no more commands."""
        if self._closed:
            return
        self._closed = True
        os.close(self._script)
        for pipes in self._pipes.values():
            pipes.close()
        self._pipes.clear()

    def _unused(self) -> int:
        """The number of pipes that nobody can write to and that are not the session's."""
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
        """Make `script` the session's next script."""
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
                await asyncio.shield(self._launcher.run_blocking(_fill, descriptor, content))
        except OSError as error:
            raise self._no_room(content, error) from error

    def _create(self, name: str) -> int:
        """A new file that the sandbox can read."""
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

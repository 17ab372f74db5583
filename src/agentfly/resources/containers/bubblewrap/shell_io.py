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
_DRAIN = 4  # chunks; a pipe holds one, and another process may refill it endlessly
_STALE = 32  # chunks; a pipe can be enlarged to half of that


class OutputPipes:
    """The stdout and stderr pipes of one command at a time, each read into a bounded buffer.

    A process that outlives its command may go on printing. That output is read slowly and discarded, so the process
    neither fails nor delays anything. The pipes serve another command once all their writers have closed them. The
    session's pipes serve it again while only the session can write to them.
    """

    def __init__(self, path: str, owner: int | None) -> None:
        """Create the pipes at `path` with ``.out`` and ``.err`` appended.

        Args:
            path: the path on the host.
            owner: the host's user that writes to them; None for this user.
        """
        self._poll = select.poll()
        self._out, self._err = (_PipeReader(path + suffix, owner, self._poll) for suffix in (".out", ".err"))
        self._in_use = False

    def start(self, stdout: BoundedOutput, stderr: BoundedOutput) -> None:
        """Collect the output of the next command. Discard what is still in the pipes.

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
        """Read the rest of the command's output. Later output is discarded."""
        if self._poll.poll(0):
            self._out.drain(_DRAIN)
            self._err.drain(_DRAIN)
        self._out.output = self._err.output = None
        self._in_use = False

    @property
    def free(self) -> bool:
        """Whether their command is finished, and no process can write to them."""
        return not (self._in_use or self._out.reading or self._err.reading)

    @property
    def lingering(self) -> bool:
        """Whether their command is finished, and a process can still write to them."""
        return not self._in_use and (self._out.reading or self._err.reading)

    def close(self) -> None:
        """Stop reading. A process that still writes gets an error."""
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
        self._poll = poll  # has the descriptor while it is open
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
        with contextlib.suppress(OSError):  # it is gone, or the sandbox has made its directory inaccessible
            os.unlink(self._path)  # noqa: PTH108  (a writer of this pipe must not reach the next one of this name)

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
        """Read once. Return False if the pipe is empty or has no writer."""
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
        if self._read() and self.output is None:  # slow down discarded output, which may be endless
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
        raise OSError(errno.ENXIO, "this is no longer a pipe", path)
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
_INLINE_BYTES = 64 * 1024  # written on the event loop; longer content is written on a thread


class ShellDirectory:
    """The host's side of the shell's directory. The sandbox sees it read-only, except for the pipes."""

    def __init__(self, directory: Path, launcher: Launcher) -> None:
        """Attach to the directory of a started sandbox."""
        self._directory = str(directory)
        self._launcher = launcher
        self._mounted_at = launcher.shell_mount(directory)
        self._files: dict[int, list[str]] = {}  # paths by command
        self._pipes: dict[int, OutputPipes] = {}  # by number; the last used comes last
        self._numbers = itertools.count()
        self._session_number = -1
        self._session_number = self._unused()
        self._script = self._create("command")
        self._script_length = 0
        self._closed = False

    def open_spawn_pipe(self) -> int:
        """Open the pipe to the spawner, which starts commands in processes of their own."""
        return os.open(f"{self._directory}/spawn", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def write_command(self, name: int, command: Command, directory: str) -> None:
        """Write the script and the input of a command. `remove_command` removes them, even after a failure here.

        The session's script is always the same file, which the session reads whole before it runs it.

        Args:
            name: the command's number.
            command: what to run.
            directory: the directory that the session changes to first; empty for none.

        Raises:
            ResourceError: the host has no room for them.
            ResourceDied: the directory is closed.
        """
        self._check()
        script, prelude = command.source, command.prelude
        if prelude or (len(script) > _INLINE_BYTES and not command.new_process):
            await self._write(name, "cmd", script)
            script = b"builtin . %s/%d.cmd" % (os.fsencode(self._mounted_at), name)
            script = b"( %s; %s )" % (prelude, script) if prelude else script
        if directory:
            script = f"cd -- {shlex.quote(directory)} 2>/dev/null; ".encode("utf-8", "surrogateescape") + script
        if command.new_process:
            await self._write(name, "sh", script)
        else:
            self._rewrite(script)
        if command.stdin is not None:
            await self._write(name, "in", command.stdin)

    def remove_command(self, name: int) -> None:
        """Remove the files of a command. A request that was never read must not run later."""
        for path in self._files.pop(name, ()):
            with contextlib.suppress(OSError):  # it is removed with the sandbox
                os.unlink(path)  # noqa: PTH108  (for each command, and pathlib is slow)

    def new_pipes(self) -> tuple[int, OutputPipes]:
        """Return the number of unused pipes, and the pipes."""
        number = self._unused()
        return number, self._pipes[number]

    def session_pipes(self, *, fresh: bool) -> tuple[int, OutputPipes]:
        """Return the number of the session's pipes, and the pipes.

        Args:
            fresh: whether to use other pipes than before, because another process may hold those too.
        """
        if fresh:
            self._session_number = self._unused()
        return self._session_number, self._pipes[self._session_number]

    def finish_output(self, pipes: OutputPipes) -> None:
        """Stop collecting a command's output. Processes that outlive it may go on printing, within bounds."""
        pipes.finish()
        if len(self._pipes) > MAX_LINGERING_PIPES:
            held = self._session_number
            lingering = [number for number, pipes in self._pipes.items() if pipes.lingering and number != held]
            for number in lingering[:-MAX_LINGERING_PIPES]:
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
        """Return the number of pipes that no process can write to and that are not the session's."""
        held = self._session_number
        number = next((number for number, pipes in self._pipes.items() if pipes.free and number != held), None)
        if number is None:
            number = next(self._numbers)
            pipes = OutputPipes(f"{self._directory}/{number}", self._launcher.uid)
        else:
            pipes = self._pipes.pop(number)
        self._pipes[number] = pipes
        return number

    def _rewrite(self, script: bytes) -> None:
        """Write the session's next script."""
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
            if len(content) <= _INLINE_BYTES:
                _fill(descriptor, content)
            else:  # after a cancellation, the thread still closes the file, which is then removed already
                await asyncio.shield(self._launcher.run_blocking(_fill, descriptor, content))
        except OSError as error:
            raise self._no_room(content, error) from error

    def _create(self, name: str) -> int:
        """Create a file that the sandbox can read. Return its descriptor."""
        descriptor = os.open(f"{self._directory}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self._launcher.uid is not None:
            os.fchown(descriptor, self._launcher.uid, self._launcher.uid)
        return descriptor

    def _check(self) -> None:
        if self._closed:
            raise ResourceDied("The sandbox was released or reset while a command was being passed to it.")

    def _no_room(self, content: bytes, error: OSError) -> ResourceError:
        return ResourceError(
            f"The host could not write {len(content)} bytes for a sandbox to {self._directory}: {error}"
        )


def _fill(descriptor: int, content: bytes) -> None:
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)

"""OutputPipes: the host's ends of the two named pipes that a command's output goes to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import stat

from agentfly.resources.containers.output import BoundedOutput

_CHUNK = 65536
_DISCARD_PAUSE_S = 0.02
_DRAIN = 4  # chunks; a pipe holds one, and somebody else may be filling it for ever
_STALE = 32  # chunks; the most that a pipe can be made to hold is half of that


class OutputPipes:
    """The pipes of one command at a time, for stdout and stderr, each read as it fills into a bounded buffer.

    A process that outlives its command may go on printing: that is read at leisure and thrown away, so that it does not
    fail, and holds nothing up. Once nobody can write to them any more, the pipes serve the next command. Those of the
    session serve it too while nobody but the session can.
    """

    def __init__(self, path: str, owner: int | None) -> None:
        """Make the pipes at `path` with ``.out`` and ``.err`` added.

        Args:
            path: where, on the host.
            owner: the user of the host who is to write to them; None for this one.
        """
        self._poll = select.poll()
        self._out, self._err = (_End(path + suffix, owner, self._poll) for suffix in (".out", ".err"))
        self._in_use = False

    def begin(self, stdout: BoundedOutput, stderr: BoundedOutput) -> None:
        """Collect the output of the next command. What is in the pipes is nobody's, and is thrown away.

        Raises:
            OSError: this process has too many files open.
        """
        if self._poll.poll(0):
            self._out.drain(_STALE)
            self._err.drain(_STALE)
        self._in_use = True
        self._open(stdout, stderr)

    def begin_again(self) -> None:
        """Collect for the same command as before, since who was to run it has gone, and the pipes may be at their end.

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
        """Take what the command wrote before it ended; what others write later is thrown away."""
        if self._poll.poll(0):
            self._out.drain(_DRAIN)
            self._err.drain(_DRAIN)
        self._out.output = self._err.output = None
        self._in_use = False

    @property
    def free(self) -> bool:
        """Whether their command is finished, and nobody can write to them any more."""
        return not (self._in_use or self._out.reading or self._err.reading)

    @property
    def left_behind(self) -> bool:
        """Whether their command is finished, and somebody can still write to them."""
        return not self._in_use and (self._out.reading or self._err.reading)

    def close(self) -> None:
        """Stop reading, for good. A process that still writes gets an error."""
        self._out.remove()
        self._err.remove()


class _End:
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
            # opened anew when its writers have left: until the next one comes, a pipe opened just now is not at its end
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
        """Take what there is; False if there is nothing, or nobody has the pipe open for writing any more."""
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
        if self._read() and self.output is None:  # slow down who prints for ever, and would keep the event loop busy
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_DISCARD_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._readable)


def _open_pipe(path: str) -> int:
    """Open a named pipe to read from.

    Raises:
        OSError: something else is in its place, or this process has too many files open.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "that is no pipe any more", path)
    return descriptor

"""OutputPipes: the host's ends of the two named pipes that a command's output goes to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agentfly.resources.containers.output import BoundedOutput

_CHUNK = 65536
_DISCARD_PAUSE_S = 0.02
_DRAIN = 4  # chunks; a pipe holds one, and somebody else may be filling it for ever


class OutputPipes:
    """The pipes of one command at a time, for stdout and stderr, each read as it fills into a bounded buffer.

    A process that outlives its command may go on printing: that is read at leisure and thrown away, so that it does not
    fail, and holds nothing up. Once nobody can write to them any more, the pipes serve the next command.
    """

    def __init__(self, path: str, owner: int | None) -> None:
        """Make the pipes at `path` with ``.out`` and ``.err`` added.

        Args:
            path: where, on the host.
            owner: the user of the host who is to write to them; None for this one.
        """
        self._ends = [_End(path + suffix, owner) for suffix in (".out", ".err")]
        self._in_use = False

    def begin(self, stdout: BoundedOutput, stderr: BoundedOutput) -> tuple[BoundedOutput, BoundedOutput]:
        """Collect the output of the next command.

        Raises:
            OSError: this process has too many files open.
        """
        try:
            for end, output in zip(self._ends, (stdout, stderr), strict=True):
                end.begin(output)
        except OSError:
            for end in self._ends:
                end.close()
            raise
        self._in_use = True
        return stdout, stderr

    def finish(self) -> None:
        """Take what the command wrote before it ended; what others write later is thrown away."""
        for end in self._ends:
            end.finish()
        self._in_use = False

    @property
    def free(self) -> bool:
        """Whether their command is finished, and nobody can write to them any more."""
        return not self._in_use and not any(end.reading for end in self._ends)

    @property
    def left_behind(self) -> bool:
        """Whether their command is finished, and somebody can still write to them."""
        return not self._in_use and any(end.reading for end in self._ends)

    def close(self) -> None:
        """Stop reading, for good. A process that still writes gets an error."""
        for end in self._ends:
            end.remove()


class _End:
    def __init__(self, path: str, owner: int | None) -> None:
        os.mkfifo(path, 0o600)
        if owner is not None:
            os.chown(path, owner, owner)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._descriptor = -1
        self._output: BoundedOutput | None = None
        self._pause: asyncio.TimerHandle | None = None

    @property
    def reading(self) -> bool:
        return self._descriptor >= 0

    def begin(self, output: BoundedOutput) -> None:
        self._output = output
        # opened anew for each command: until its first writer comes, a pipe opened just now is not at its end
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._descriptor, self._read)

    def finish(self) -> None:
        for _ in range(_DRAIN):
            if not self.reading or not self._read():
                break
        self._output = None

    def remove(self) -> None:
        self.close()
        Path(self._path).unlink(missing_ok=True)  # who has it open must not write into the next command's

    def close(self) -> None:
        if self.reading:
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> bool:
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:  # nobody has it open for writing any more
            self.close()
            return False
        if self._output is not None:
            self._output.add(chunk)
        else:  # slows down who prints for ever, which would keep the event loop busy
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_DISCARD_PAUSE_S, self._go_on)
        return True

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._descriptor, self._read)

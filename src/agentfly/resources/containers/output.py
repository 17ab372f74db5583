"""OutputPipe: the host's end of the pipe that one command's output goes to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agentfly.resources.containers.result import BoundedOutput

_CHUNK = 65536


class OutputPipe:
    """A named pipe, read as it fills into a bounded buffer.

    A process that outlives its command may go on printing: that is read and thrown away, so that it neither blocks nor
    fails, and holds nothing up.
    """

    def __init__(self, path: Path, owner: int | None, limit: int) -> None:
        """Make the pipe at `path`, for user `owner` of the host (None: this one), and read it on the running loop."""
        self.output = BoundedOutput(limit)
        self._path = path
        self._finished = False
        os.mkfifo(path, 0o600)
        if owner is not None:
            os.chown(path, owner, owner)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)

    @property
    def closed(self) -> bool:
        """Whether every process that could write to it is gone, or it was closed here."""
        return self._descriptor < 0

    def finish(self) -> None:
        """Take what the command wrote before it ended; what others write later is thrown away."""
        if not self.closed:
            for _ in range(4):  # a pipe holds a chunk; somebody else may be filling it for ever
                if not self._read():
                    break
        self._finished = True
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop reading. A process that still writes gets an error."""
        if not self.closed:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> bool:
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        if not self._finished:
            self.output.add(chunk)
        return True

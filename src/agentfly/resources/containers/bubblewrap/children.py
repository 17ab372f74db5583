"""Children: those of one process, looked at for each command."""

from __future__ import annotations

import os


class Children:
    """The children of a process that has one thread, as every shell has.

    The kernel tells of them through a file that is opened once, which is what makes looking cheap.
    """

    def __init__(self, pid: int) -> None:
        """Look at the process `pid`, which may be gone: then it has no children."""
        try:
            self._descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1
        self._text = b""
        self._pids: frozenset[int] = frozenset()

    def pids(self) -> frozenset[int]:
        """Their process ids, as the host counts."""
        try:
            text = os.pread(self._descriptor, 65536, 0)
        except OSError:  # it is gone
            text = b""
        if text != self._text:
            self._text, self._pids = text, frozenset(map(int, text.split()))
        return self._pids

    def close(self) -> None:
        """Look no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

"""Spawned: a program that has been started with nothing of this process but the files that it was given."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Sequence

_ABOVE = 64  # the numbers that a started program may be given files at are below
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class Spawned:
    """A child process.

    `subprocess` has a child ignore the signals that this process ignores, such as hang-ups if it was started by
    ``nohup``. What runs in a sandbox is to find the same there however its owner was started.

    Attributes:
        pid: its process id.
        returncode: its exit code, or the negative number of the signal that ended it; None until `poll` has found out.
    """

    def __init__(self, words: Sequence[str], files: Sequence[int]) -> None:
        """Start a program in a session of its own, with an empty environment and every signal as it is by default.

        It is the child of the calling thread, and has that one's user and mounts.

        Args:
            words: its path and its arguments.
            files: open files, which it finds as 0, 1, 2 and so on.

        Raises:
            OSError: it cannot be started.
        """
        self.returncode: int | None = None
        copies: list[int] = []
        try:
            # what is copied to the number that it has already would be closed (in older versions of the C library)
            copies += (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for descriptor in files)
            self.pid = os.posix_spawn(
                words[0],
                list(words),
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, copy, number) for number, copy in enumerate(copies)],
                setsid=True,  # a Ctrl-C at the terminal is for us, not for the sandboxes
                setsigmask=(),
                setsigdef=_SIGNALS,
            )
        finally:
            for copy in copies:
                os.close(copy)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else in this process has waited for it
                self.returncode = 255
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

"""FirstProcess: process 1 of a sandbox, known for certain, also to whoever comes after the one who started it.

With process 1 the kernel ends all the others of its namespace. Process 1 is to end with who started it, but that is a
setting of its own, and what runs inside may find a way to change it. So who it is, is written down before anything of
the agent's runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.identity import start_time
from agentfly.resources.processes import descendants, signal_below

_FILE = "first"
_PAUSE_S = 0.005


@dataclass(frozen=True)
class FirstProcess:
    """A process, told apart from any later one that gets the same id.

    Args:
        pid: the host's process id.
        started: its start time in clock ticks since boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> FirstProcess:
        """The process that has this id now.

        Raises:
            ProcessLookupError: there is none.
        """
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(f"process {pid} has ended already")
        return cls(pid, started)

    @classmethod
    def noted(cls, directory: Path) -> FirstProcess | None:
        """The process that was written down in the directory of a sandbox; None if there was none yet."""
        try:
            pid, started = map(int, (directory / _FILE).read_text().split())
        except (OSError, ValueError):
            return None
        return cls(pid, started)

    def note(self, directory: Path) -> None:
        """Write it down in the directory of a sandbox.

        Raises:
            OSError: there is no room, or something has been written down before.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(f"{directory}/{_FILE}", flags, 0o600)
        try:
            os.write(descriptor, b"%d %d" % (self.pid, self.started))
        finally:
            os.close(descriptor)

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return start_time(self.pid) == self.started

    def end(self, patience_s: float) -> None:
        """Kill it with all processes below it, and return when it is gone.

        Raises:
            TimeoutError: it does not die.
            PermissionError: it is somebody else's.
        """
        deadline = time.monotonic() + patience_s
        while self.lives:
            if time.monotonic() > deadline:
                left = sorted({self.pid, *descendants(self.pid)})
                raise TimeoutError(f"the processes {left} did not end within {patience_s:g} s of being killed")
            self._kill()
            time.sleep(_PAUSE_S)

    def _kill(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.lives:
                return
            with contextlib.suppress(ProcessLookupError):
                # where there is no namespace that ends with it, none below it gets away by being left behind
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
                signal_below(self.pid, signal.SIGSTOP)
                signal_below(self.pid, signal.SIGKILL)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)

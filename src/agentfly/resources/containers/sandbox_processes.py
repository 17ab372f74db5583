"""The processes of a sandbox, seen from the host: finding, signalling and killing them.

A process is signalled through a pidfd only, after a check that it belongs to the sandbox. So a reused process id cannot
hit another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.process.procfs import children, descendants, signal_descendants, start_time

_ROUNDS = 100


@dataclass(frozen=True)
class PidNamespace:
    """The PID namespace of a sandbox.

    Args:
        init_pid: the host's process id of the namespace's process 1.
        inode: the inode of the namespace.
    """

    init_pid: int
    inode: int

    @classmethod
    def of(cls, first: int) -> PidNamespace:
        """Return the namespace whose process 1 is `first`."""
        return cls(first, Path(f"/proc/{first}/ns/pid").stat().st_ino)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process of this namespace; False if it is gone or belongs to another."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if not self._contains(pid):
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def host_pid(self, inside: int, parent: int) -> int | None:
        """Return the host's process id of a child of `parent` with the id `inside` in the sandbox."""
        return next((pid for pid in children(parent) if _inner_pid(pid) == inside), None)

    def inner_pids(self, parent: int) -> set[int]:
        """The process ids in the sandbox of the children of `parent`."""
        return {inside for pid in children(parent) if (inside := _inner_pid(pid)) is not None}

    def pids(self) -> set[int]:
        """The host's process ids of all its processes."""
        return {self.init_pid} | descendants(self.init_pid)

    def stop(self) -> None:
        """Send SIGSTOP to every process, including those forked meanwhile.

        A process of the same user can undo this with SIGCONT, so it does not hold hostile code.
        """
        self._stop_all({self.init_pid})

    def resume(self) -> None:
        """Send SIGCONT to every process, including those stopped by others."""
        for pid in self.pids():
            self.signal(pid, signal.SIGCONT)

    def kill_trees(self, roots: set[int]) -> None:
        """Kill processes and all their descendants. All are stopped before any is killed, so none can fork away."""
        for pid in self._stop_all(roots):
            self.signal(pid, signal.SIGKILL)

    def _stop_all(self, roots: set[int]) -> set[int]:
        """Stop processes and all their descendants, including those forked meanwhile; return their ids."""
        stopped: set[int] = set()
        for _ in range(_ROUNDS):
            fresh = roots.union(*map(descendants, roots)) - stopped
            if not fresh:
                break
            for pid in fresh:
                self.signal(pid, signal.SIGSTOP)
            stopped |= fresh
        return stopped

    def _contains(self, pid: int) -> bool:
        """Whether a process belongs to this namespace.

        Raises:
            OSError: it is gone.
        """
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino == self.inode


def kill_with_children(pid: int) -> None:
    """Kill a process that was not waited for, and its children.

    The child is killed first: if bubblewrap dies before its child is set up, the child waits forever.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # its set of children is fixed now
        for child in children(pid):
            os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def _inner_pid(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:  # noqa: PTH123  (for each start; pathlib is slow)
            _, _, ids = file.read().partition(b"\nNSpid:")
    except OSError:
        return None
    return int(ids.partition(b"\n")[0].split()[-1]) if ids else None


_FILE = "first"
_PAUSE_S = 0.005


@dataclass(frozen=True)
class InitProcess:
    """Process 1 of a sandbox, identified so that a reused process id is not mistaken for it.

    When process 1 ends, the kernel kills the rest of its namespace. Process 1 is meant to end with its starter, but a
    process inside may undo that setting. So its identity is saved before anything of the agent runs.

    Args:
        pid: the host's process id.
        started: its start time in clock ticks since boot.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> InitProcess:
        """The process that has this id now.

        Raises:
            ProcessLookupError: there is none.
        """
        started = start_time(pid)
        if started is None:
            raise ProcessLookupError(f"process {pid} has ended already")
        return cls(pid, started)

    @classmethod
    def load(cls, directory: Path) -> InitProcess | None:
        """The process that was saved in a sandbox's directory; None if none was."""
        try:
            pid, started = map(int, (directory / _FILE).read_text().split())
        except (OSError, ValueError):
            return None
        return cls(pid, started)

    def save(self, directory: Path) -> None:
        """Save it in a sandbox's directory.

        Raises:
            OSError: there is no room, or a process was saved before.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(f"{directory}/{_FILE}", flags, 0o600)
        try:
            os.write(descriptor, b"%d %d" % (self.pid, self.started))
        finally:
            os.close(descriptor)

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return start_time(self.pid) == self.started

    def kill(self, patience_s: float) -> None:
        """Kill it with all its descendants, and return when it is gone.

        Raises:
            TimeoutError: it does not die.
            PermissionError: it belongs to another user.
        """
        deadline = time.monotonic() + patience_s
        while self.alive:
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
            if not self.alive:
                return
            with contextlib.suppress(ProcessLookupError):
                # without a namespace, its descendants would survive it as orphans
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
                signal_descendants(self.pid, signal.SIGSTOP)
                signal_descendants(self.pid, signal.SIGKILL)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class ProcessTree(PidNamespace):
    """The processes of a sandbox without PID namespace: its first process, which adopts orphans, and all its
    descendants.

    Args:
        inode: 0, because there is no namespace.
        started: the start time of the first process, which detects a reused process id.
    """

    started: int

    @classmethod
    def of(cls, first: int) -> ProcessTree:
        """See `PidNamespace.of`."""
        return cls(first, 0, InitProcess.of(first).started)

    def _contains(self, pid: int) -> bool:
        if not InitProcess(self.init_pid, self.started).alive:
            return False
        return pid == self.init_pid or pid in descendants(self.init_pid)

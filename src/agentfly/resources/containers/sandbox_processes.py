"""Children: those of one process, looked at for each command.

The processes of a sandbox, seen from the host: who there is, and how to end some of them.

A process is only ever signalled through a pidfd, after checking that it belongs to the sandbox's process namespace, so
that a reused process id cannot hit anybody else.

FirstProcess: process 1 of a sandbox, known for certain, also to whoever comes after the one who started it.

With process 1 the kernel ends all the others of its namespace. Process 1 is to end with who started it, but that is a
setting of its own, and what runs inside may find a way to change it. So who it is, is written down before anything of
the agent's runs.

ProcessTree: the processes of a sandbox that has no process namespace: all that descend from its first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.process.procfs import children, descendants, signal_descendants, start_time


class ChildList:
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


_ROUNDS = 100


@dataclass(frozen=True)
class PidNamespace:
    """The process namespace of a sandbox.

    Args:
        init_pid: the host's process id of the namespace's process 1.
        inode: which namespace it is.
    """

    init_pid: int
    inode: int

    @classmethod
    def of(cls, first: int) -> PidNamespace:
        """The namespace that `first` is process 1 of."""
        return cls(first, Path(f"/proc/{first}/ns/pid").stat().st_ino)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process of this namespace; False if it is gone or was never of it."""
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
        """The host's process id of the child of `parent` that has the id `inside` in the sandbox."""
        return next((pid for pid in children(parent) if _inner_pid(pid) == inside), None)

    def inner_pids(self, parent: int) -> set[int]:
        """The ids that the children of `parent` have in the sandbox."""
        return {inside for pid in children(parent) if (inside := _inner_pid(pid)) is not None}

    def pids(self) -> set[int]:
        """The host's ids of all its processes."""
        return {self.init_pid} | descendants(self.init_pid)

    def stop(self) -> None:
        """Stop all processes; none gets away by forking. One that is stopped can be let go on by another of its user's
        that was not, so this holds only what does not mind.
        """
        self._stop_all({self.init_pid})

    def resume(self) -> None:
        """Let all processes go on, those too that somebody else has stopped."""
        for pid in self.pids():
            self.signal(pid, signal.SIGCONT)

    def kill_trees(self, roots: set[int]) -> None:
        """Kill processes and all that descend from them. None gets away by forking: all are stopped before any dies."""
        for pid in self._stop_all(roots):
            self.signal(pid, signal.SIGKILL)

    def _stop_all(self, roots: set[int]) -> set[int]:
        """Stop processes and all that descend from them, those too that are being forked meanwhile; who they are."""
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
        """Whether a process is of this namespace.

        Raises:
            OSError: it is gone.
        """
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino == self.inode


def kill_with_children(pid: int) -> None:
    """Kill a process that has not been waited for, and its children.

    A bubblewrap that dies before its child is set up leaves it waiting for ever, so the child goes first.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # no child can come or go now
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
    """A process, told apart from any later one that gets the same id.

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
        """The process that was written down in the directory of a sandbox; None if there was none yet."""
        try:
            pid, started = map(int, (directory / _FILE).read_text().split())
        except (OSError, ValueError):
            return None
        return cls(pid, started)

    def save(self, directory: Path) -> None:
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
    def alive(self) -> bool:
        """Whether it has not ended."""
        return start_time(self.pid) == self.started

    def kill(self, patience_s: float) -> None:
        """Kill it with all processes below it, and return when it is gone.

        Raises:
            TimeoutError: it does not die.
            PermissionError: it is somebody else's.
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
                # where there is no namespace that ends with it, none below it gets away by being left behind
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
                signal_descendants(self.pid, signal.SIGSTOP)
                signal_descendants(self.pid, signal.SIGKILL)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class ProcessTree(PidNamespace):
    """The first process of a sandbox, which adopts what its descendants leave behind, and all below it.

    Args:
        inode: 0, for there is no namespace.
        started: the start time of the first process, by which it is told from a later one of the same id.
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

"""The processes of a sandbox, seen from the host: who there is, and how to end some of them.

A process is only ever signalled through a pidfd, after checking that it belongs to the sandbox's process namespace, so
that a reused process id cannot hit anybody else.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.processes import children, descendants

_ROUNDS = 100


@dataclass(frozen=True)
class ProcessNamespace:
    """The process namespace of a sandbox.

    Args:
        first: the host's process id of the namespace's process 1.
        inode: which namespace it is.
    """

    first: int
    inode: int

    @classmethod
    def of(cls, first: int) -> ProcessNamespace:
        """The namespace that `first` is process 1 of."""
        return cls(first, Path(f"/proc/{first}/ns/pid").stat().st_ino)

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process of this namespace; False if it is gone or was never of it."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if not self._has(pid):
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def find(self, inside: int, parent: int) -> int | None:
        """The host's process id of the child of `parent` that has the id `inside` in the sandbox."""
        return next((pid for pid in children(parent) if _inside_id(pid) == inside), None)

    def ids_inside(self, parent: int) -> set[int]:
        """The ids that the children of `parent` have in the sandbox."""
        return {inside for pid in children(parent) if (inside := _inside_id(pid)) is not None}

    def everybody(self) -> set[int]:
        """The host's ids of all its processes."""
        return {self.first} | descendants(self.first)

    def stop(self) -> None:
        """Stop all processes; none gets away by forking. One that is stopped can be let go on by another of its user's
        that was not, so this holds only what does not mind.
        """
        self._stop_all({self.first})

    def go_on(self) -> None:
        """Let all processes go on, those too that somebody else has stopped."""
        for pid in self.everybody():
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

    def _has(self, pid: int) -> bool:
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


def _inside_id(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:  # noqa: PTH123  (for each start; pathlib is slow)
            _, _, ids = file.read().partition(b"\nNSpid:")
    except OSError:
        return None
    return int(ids.partition(b"\n")[0].split()[-1]) if ids else None

"""Processes of this machine as /proc shows them (proc(5)): identity, descendants, memory, closed peers."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguishable from later ones with the same id.

    Attributes:
        pid: its process id, as seen in its own pid namespace.
        started: its start time in clock ticks since boot (field 22 of ``/proc/PID/stat``, proc(5)).
        boot: the boot it runs in.
        namespace: its pid namespace, in which ``pid`` is valid.
        machine: the machine, which may share its files with others.
    """

    pid: int
    started: int
    boot: str
    namespace: str
    machine: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        pid = os.getpid()
        return cls(
            pid=pid,
            started=start_time(pid) or 0,
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=str(Path("/proc/self/ns/pid").readlink()),
            machine=socket.gethostname(),
        )

    @classmethod
    def from_json(cls, saved: Any) -> ProcessIdentity:
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: the value is no process identity.
        """
        match saved:
            case {"pid": int(), "started": int(), "boot": str(), "namespace": str(), "machine": str()} if (
                len(saved) == 5
            ):
                return cls(**saved)
        raise ValueError(f"{saved!r:.200} is not a process")

    def is_dead(self) -> bool:
        """Whether the process is certainly gone. An unknown state counts as alive."""
        here = ProcessIdentity.current()
        if self.machine != here.machine:
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and start_time(self.pid) != self.started


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program name is in parentheses and may contain any character, including parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def age_seconds(started: int) -> float:
    """Return the seconds since a start time in clock ticks since boot."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if the process does not exist."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)


_ROUNDS = 100


def children(pid: int) -> list[int]:
    """Return the children of a process, from all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process, or a thread of it, is gone
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  (called for every start and kill, and pathlib is slow)
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    edge = children(pid)
    while edge:
        found.update(edge)
        edge = [below for above in edge for below in children(above) if below not in found]
    return found


def signal_descendants(pid: int, number: signal.Signals) -> None:
    """Send a signal to all descendants of a process. A stop also reaches processes forked meanwhile.

    Signals go through pidfds that were verified to be descendants, so a reused process id is never hit.
    """
    reached: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = descendants(pid) - reached
        if not fresh:
            break
        opened = {below: descriptor for below in fresh if (descriptor := _open(below)) is not None}
        still = descendants(pid)
        for below, descriptor in opened.items():
            if below in still:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
            os.close(descriptor)
        reached |= fresh


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def uid_of(pid: int) -> int | None:
    """Return the user id of a process, readable even if the process is not dumpable; None if it does not exist."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


def private_memory_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes, including page tables.

    Pages shared by forks are counted in shares.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        lines += Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    own = ("Pss_Anon:", "Pss_Shmem:", "VmPTE:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(own))


_GONE = select.POLLHUP | select.POLLRDHUP | select.POLLERR


def peer_closed(descriptor: int) -> bool:
    """Return whether the other end of a socket has been closed, even if unread data remains. It takes a microsecond.

    The end of a process closes its sockets, so this detects it before the event loop does.
    """
    return _polled(descriptor, _GONE)


def has_exited(pidfd: int) -> bool:
    """Return whether a process has ended, given its pidfd (pidfd_open(2))."""
    return _polled(pidfd, select.POLLIN)


def _polled(descriptor: int, events: int) -> bool:
    polling = select.poll()
    polling.register(descriptor, events)
    return any(found & (events | select.POLLNVAL) for _, found in polling.poll(0))

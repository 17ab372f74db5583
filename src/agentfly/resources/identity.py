"""Who a process is, so that it is known for certain whether it still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from any later one that gets the same id.

    Attributes:
        pid: its process id, as seen in its own pid namespace.
        started: its start time in clock ticks since boot (field 22 of ``/proc/PID/stat``, proc(5)).
        boot: the boot it runs in.
        namespace: its pid namespace, in which alone ``pid`` has a meaning.
        machine: the machine, which may share its files with others.
    """

    pid: int
    started: int
    boot: str
    namespace: str
    machine: str

    @classmethod
    def here(cls) -> ProcessIdentity:
        """This process."""
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
        """What `dataclasses.asdict` made of one.

        Raises:
            ValueError: it is none.
        """
        match saved:
            case {"pid": int(), "started": int(), "boot": str(), "namespace": str(), "machine": str()} if (
                len(saved) == 5
            ):
                return cls(**saved)
        raise ValueError(f"{saved!r:.200} is no process")

    def is_dead(self) -> bool:
        """Whether the process is certainly gone. What cannot be told from here counts as living."""
        here = ProcessIdentity.here()
        if self.machine != here.machine:
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and start_time(self.pid) != self.started


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name stands in parentheses and may hold anything, parentheses too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def age_seconds(started: int) -> float:
    """How long ago a process started, by its start time in clock ticks since boot."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def command_of(pid: int) -> str:
    """The command line of a process; empty when there is no such process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)

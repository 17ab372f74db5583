"""The processes of this machine as /proc tells of them (proc(5)): who is below whom, and what they take.

Who a process is, is `agentfly.resources.identity`'s matter.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_ROUNDS = 100


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads made them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it, or a thread of it, is gone
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  (every start and kill asks, and pathlib is slow)
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> set[int]:
    """All processes below a process."""
    found: set[int] = set()
    edge = children(pid)
    while edge:
        found.update(edge)
        edge = [below for above in edge for below in children(above) if below not in found]
    return found


def signal_below(pid: int, number: signal.Signals) -> None:
    """Send a signal to every process below a process. A stop reaches those too that are being forked meanwhile.

    Each gets it through a pidfd, after it was seen to be below the process, so that a reused process id hits nobody.
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


def user_of(pid: int) -> int | None:
    """The user that a process is, whatever it has made of what others may see of it; None if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


def private_memory(pid: int) -> int:
    """Bytes of memory that are a process's own, to be counted once among processes that share pages by forking, and
    those of the tables in which the kernel keeps where its pages are.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        lines += Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    own = ("Pss_Anon:", "Pss_Shmem:", "VmPTE:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(own))

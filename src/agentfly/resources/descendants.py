"""Descendants: how a process comes to have all that is started below it, and ends it (Linux, prctl(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKERS_S = 2.0


def adopt_descendants() -> None:
    """From now on, whatever is started below this process becomes its child when its own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent's thread that started it ends. Nothing that it starts inherits this."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def reap_one() -> tuple[int, int] | None:
    """The id and exit status of a child that has ended, or None; a signal's number is negative."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def end_descendants() -> None:
    """Kill everything below this process: as each one ends, its children are adopted and are next.

    Python's resource trackers get a moment to end by themselves, which they do when those whose files they track have
    ended: they remove the shared memory and semaphores that these left behind.
    """
    deadline = time.monotonic() + _TRACKERS_S
    while children := _children():
        overdue = time.monotonic() > deadline
        ending = [child for child in children if overdue or not is_resource_tracker(child)]
        for child in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if ending:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        else:
            time.sleep(0.01)
        while reap_one() is not None:
            pass


def is_resource_tracker(pid: int) -> bool:
    """Whether a process is what Python's multiprocessing starts beside its processes to tidy up after them."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _children() -> list[int]:
    """Ids of this process's children."""
    me = str(os.getpid())
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may hold anything; what follows it is well formed.
                if (folder / "stat").read_text().rpartition(")")[2].split()[1] == me:
                    children.append(int(folder.name))
    return children


def _prctl(option: int, value: int) -> None:
    """Set a property of this process that Python has no call for."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")

"""Descendants: how a process comes to have all that is started below it, and ends it (Linux, prctl(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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
    """Kill everything below this process: as each one ends, its children are adopted and are next."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


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

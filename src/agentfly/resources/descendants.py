"""Descendants: how a small process has all that is started below it, hears of its ends, and leaves nothing of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from agentfly.resources.processes import children

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TRACKERS_S = 2.0
"""Seconds that Python's resource trackers get to tidy up."""


def adopt_descendants() -> None:
    """From now on, whatever is started below this process becomes its child when its own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when the thread of its parent that forked it ends. Its children do not inherit this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reset_signals() -> None:
    """Have every signal do what it does by default, as before a program is executed, which would inherit otherwise."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def wakeups() -> int:
    """A descriptor that can be read whenever a child ends or a signal with a handler comes."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    return woken


def reap_one() -> tuple[int, int] | None:
    """The id and exit status of a child that has ended; a signal's number is negative."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def end_descendants() -> None:
    """Kill everything below this process: as each process ends, its children become this one's and are next.

    Python's resource trackers come last, if they do not end by themselves, which they do when those whose files they
    track have ended: they remove the shared memory and semaphores that these leave behind.
    """
    overdue = time.monotonic() + TRACKERS_S
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in children(os.getpid()):
                if time.monotonic() > overdue or not is_resource_tracker(child):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.0005)


def is_resource_tracker(pid: int) -> bool:
    """Whether a process is the one that Python's multiprocessing starts beside its processes to tidy up after them."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def prctl(option: int, value: int) -> None:
    """Set a property of this process that Python has no call for (Linux, prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")

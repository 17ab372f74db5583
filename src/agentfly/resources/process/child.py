"""Child processes: subreaper and parent-death signal, killing all descendants, and starting fresh interpreters."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from agentfly.resources.process.procfs import children

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

RESOURCE_TRACKER_GRACE_S = 2.0
"""Seconds that Python's resource trackers get to tidy up."""


def become_subreaper() -> None:
    """From now on, whatever is started below this process becomes its child when its own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal() -> None:
    """Have this process killed when the thread of its parent that forked it ends. Its children do not inherit this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reset_signals() -> None:
    """Have every signal do what it does by default, as before a program is executed, which would inherit otherwise."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def child_wakeup_fd() -> int:
    """A descriptor that can be read whenever a child ends or a signal with a handler comes."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    return woken


def reap_child() -> tuple[int, int] | None:
    """The id and exit status of a child that has ended; a signal's number is negative."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def kill_descendants() -> None:
    """Kill everything below this process: as each process ends, its children become this one's and are next.

    Python's resource trackers come last, if they do not end by themselves, which they do when those whose files they
    track have ended: they remove the shared memory and semaphores that these leave behind.
    """
    overdue = time.monotonic() + RESOURCE_TRACKER_GRACE_S
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


INHERITED_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE"),
        *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONUTF8"),
    }
)
"""What programs and interpreters need in order to be found and to start; further ``LC_…``, for the locale."""

# The path is set before anything of AgentFly is imported, so that both sides run the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from {module} import {function}; {function}(*json.loads(sys.argv[2]))"
)


def python_command(address: str, *arguments: int | str) -> list[str]:
    """The command line of a new interpreter that calls a function.

    Args:
        address: the function, as ``module:name``.
        arguments: what it is called with. They are on the command line, which everybody on the machine can read.
    """
    module, _, function = address.partition(":")
    boot = _BOOT.format(module=module, function=function)
    return [sys.executable, "-c", boot, json.dumps(search_path()), json.dumps(arguments)]


def minimal_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process is given of this one's environment that is not to have the secrets in it."""
    return {name: value for name, value in environment.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}


def search_path() -> list[str]:
    """Where Python looks for modules here, in words that mean the same in another directory.

    What Python passes over, such as a `Path` that somebody appended, is left out.
    """
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]  # noqa: PTH117
    return [os.path.join(here, entry) if entry else here for entry in sys.path if isinstance(entry, str)]  # noqa: PTH118


def describe_exit(status: int) -> str:
    """How a process ended.

    Args:
        status: its exit status; negative for the number of a signal.
    """
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # one of the real-time signals, most of which have no name
        name = f"signal {-status}"
    return f"it was ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")

"""Child processes: what supervisors share, and how fresh interpreters start.

A supervisor is a subreaper: orphaned descendants of its child become its own children. It waits with `ChildWatch` until
the child ends, and then kills all descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentfly.resources.process.procfs import children

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

RESOURCE_TRACKER_GRACE_S = 2.0
"""Seconds that Python's resource trackers have to clean up."""


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children from now on."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal() -> None:
    """Have this process killed when the parent thread that forked it ends. Children do not inherit this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reset_signals() -> None:
    """Restore the default action of all signals before exec, because the program would inherit the current ones."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def child_wakeup_pipe() -> tuple[int, int]:
    """Make a pipe whose read end becomes readable when a child ends or a signal with a handler arrives.

    A fork must close both ends and call ``signal.set_wakeup_fd(-1)``. From Python 3.12 on, asyncio calls it in forks.

    Returns:
        The read end and the write end.
    """
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    return woken, wakes


def reap_child() -> tuple[int, int] | None:
    """Return the id and exit status of an ended child, negative for a signal number; None if none has ended."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


class ChildWatch:
    """A supervisor's wait for the end of its child. It also ends if the owner is gone or SIGTERM arrives.

    Args:
        child: id of the child.
        is_owner_alive: returns whether the process that owns the child is alive. It is asked at every wake-up.

    Attributes:
        status: the exit status of the child, negative for a signal number; None unless it has ended.
    """

    def __init__(self, child: int, is_owner_alive: Callable[[], bool]) -> None:
        self.status: int | None = None
        self._child = child
        self._is_owner_alive = is_owner_alive
        self._stop_requested = False
        self._woken, _ = child_wakeup_pipe()
        signal.signal(signal.SIGTERM, self._request_stop)

    def wait(self, descriptors: Sequence[int], timeout_s: float) -> list[int] | None:
        """Wait until a descriptor is readable, a child ends, or the time is over.

        Returns:
            The readable descriptors; None if the supervisor must end.
        """
        if self._must_end():
            return None
        readable, _, _ = select.select([*descriptors, self._woken], [], [], timeout_s)
        if self._woken in readable:
            readable.remove(self._woken)
            os.read(self._woken, 4096)
        return None if self._must_end() else readable

    def _must_end(self) -> bool:
        if self._stop_requested or not self._is_owner_alive():
            return True
        while (ended := reap_child()) is not None:
            pid, status = ended
            if pid == self._child:
                self.status = status
                return True
        return False

    def _request_stop(self, *_: object) -> None:
        self._stop_requested = True


def kill_descendants() -> None:
    """Kill all descendants of this process. Children of a killed process become its own children and are killed next.

    Python's resource trackers are killed last. They normally end by themselves after the processes they track, and
    remove the shared memory and semaphores of these processes.
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
    """Return whether a process is a resource tracker of Python's multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def prctl(option: int, value: int) -> None:
    """Call prctl(2), for which Python has no function (Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


INHERITED_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE"),
        *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONUTF8"),
    }
)
"""Variables that programs and interpreters need to start. ``LC_…`` variables, for the locale, are inherited, too."""

# The path is set before AgentFly is imported, so that both sides run the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from {module} import {function}; {function}(*json.loads(sys.argv[2]))"
)


def python_command(address: str, *arguments: int | str) -> list[str]:
    """Return the command line of a new interpreter that calls a function.

    Args:
        address: the function, as ``module:name``.
        arguments: its arguments. They are on the command line, which every user of the machine can read.
    """
    module, _, function = address.partition(":")
    boot = _BOOT.format(module=module, function=function)
    return [sys.executable, "-c", boot, json.dumps(search_path()), json.dumps(arguments)]


def minimal_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of this process's environment that is safe to pass on, without secrets."""
    return {name: value for name, value in environment.items() if name in INHERITED_VARIABLES or name.startswith("LC_")}


def search_path() -> list[str]:
    """Return the module search path of this process, with absolute entries.

    Entries that Python ignores, such as a `Path` object, are left out.
    """
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]  # noqa: PTH117
    return [os.path.join(here, entry) if entry else here for entry in sys.path if isinstance(entry, str)]  # noqa: PTH118


def describe_exit(status: int) -> str:
    """Describe how a process ended.

    Args:
        status: its exit status; negative for the number of a signal.
    """
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # one of the real-time signals, most of which have no name
        name = f"signal {-status}"
    return f"it was ended by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")

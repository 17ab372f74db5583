"""Removes what a dead process left of its bubblewrap and Landlock containers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from agentfly.resources.containers.runtime_directory import (
    CONFINE_PROGRAM,
    GROUPS,
    SHELL_DIRECTORY,
    remove_sandbox_directory,
    restore_owner_access,
    sandbox_uid,
)
from agentfly.resources.containers.sandbox_processes import InitProcess
from agentfly.resources.process.cgroups import remove_cgroups, thaw_cgroup
from agentfly.resources.process.procfs import uid_of

_PATIENCE_S = 10.0


def reap_bubblewrap(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a container name. Fine if it is gone already.

    Raises:
        OSError: a process of it does not die, or something of it cannot be removed.
    """
    home = Path(traces["scratch"])
    for directory in (home.parent, home):
        restore_owner_access(directory)
    for scratch in home.glob("*"):
        restore_owner_access(scratch)
    groups = [group for scratch in home.glob("*") for group in _groups(scratch)]
    for group in groups:
        thaw_cgroup(group)  # what is frozen does not die
    deadline = time.monotonic() + _PATIENCE_S
    _end(
        home, CONFINE_PROGRAM, signal.SIGTERM, deadline - _PATIENCE_S / 2
    )  # they know what else there is, and end it first
    _end(home, CONFINE_PROGRAM, signal.SIGKILL, deadline)
    for scratch in home.glob("*"):
        if (first := InitProcess.load(scratch)) is not None and uid_of(first.pid) == sandbox_uid():
            first.kill(max(0.0, deadline - time.monotonic()))
    if left := _end(home, SHELL_DIRECTORY, signal.SIGKILL, deadline):
        raise TimeoutError(f"the processes {left} of {home} do not end though they were killed")
    remove_cgroups(groups, max(0.0, deadline - time.monotonic()))
    remove_sandbox_directory(home)


def _end(home: Path, name: str, number: signal.Signals, deadline: float) -> list[int]:
    """Signal the programs that were started for a sandbox until they are gone; those that are left at the deadline."""
    while started := _started_for(home, name):
        if time.monotonic() > deadline:
            break
        for pid in started:
            for one in (number, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)
        time.sleep(0.01)
    return started


def _groups(scratch: Path) -> list[Path]:
    """The control groups of one life of a sandbox."""
    try:
        return [Path(line) for line in (scratch / GROUPS).read_text().splitlines()]
    except OSError:  # it was not started, or is gone
        return []


def _started_for(home: Path, name: str) -> list[int]:
    """The programs that were started for a sandbox: they name a directory or file that is its alone."""
    named = re.compile(rb"(?:^|\0)" + re.escape(os.fsencode(home)) + rb"/\d+/" + re.escape(name.encode()) + rb"[/\0]")
    user = sandbox_uid()  # others may name it too, such as who looks at it
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if named.search((entry / "cmdline").read_bytes()) and uid_of(int(entry.name)) == user:
                    found.append(int(entry.name))
    return found

"""Removes what a dead process left of its enroot containers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from agentfly.resources.containers.enroot.plan import GROUPS
from agentfly.resources.containers.runtime_directory import remove_sandbox_directory, sandbox_uid
from agentfly.resources.containers.sandbox_processes import InitProcess
from agentfly.resources.process.cgroups import cgroup_pids, remove_cgroups, thaw_cgroup
from agentfly.resources.process.procfs import uid_of

_PATIENCE_S = 10.0


def reap_enroot(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a container name. Fine if it is gone already.

    Raises:
        OSError: a process of it does not die, or something of it cannot be removed.
    """
    place = Path(traces["place"])
    groups = _groups(place)
    for group in groups:
        thaw_cgroup(group)  # what is frozen does not die
    deadline = time.monotonic() + _PATIENCE_S
    while left := {*_started_for(place), *(member for group in groups for member in cgroup_pids(group))}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {sorted(left)} of {place} do not die")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if (first := InitProcess.load(place)) is not None and uid_of(first.pid) == sandbox_uid():
        first.kill(_PATIENCE_S)
    remove_cgroups(groups)
    remove_sandbox_directory(place)


def _groups(place: Path) -> list[Path]:
    try:
        return [Path(line) for line in (place / GROUPS).read_text().splitlines()]
    except OSError:  # it was not started, or is gone
        return []


def _started_for(place: Path) -> list[int]:
    """Return the host's processes, including process 1, that have the sandbox's directory as an argument."""
    word = os.fsencode(place)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if word in words and uid_of(int(entry.name)) in (os.geteuid(), sandbox_uid()):
                    found.append(int(entry.name))
    return found

"""Removes what a process that died left of its containers of enroot."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from agentfly.resources.cgroups import members, remove, thaw
from agentfly.resources.containers.bubblewrap.first_process import FirstProcess
from agentfly.resources.containers.bubblewrap.scratch import remove_scratch, sandbox_uid
from agentfly.resources.containers.enroot.place import GROUPS
from agentfly.resources.processes import user_of

_PATIENCE_S = 10.0


def reap(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a container name. Fine if it is gone already.

    Raises:
        OSError: a process of it does not die, or something of it cannot be removed.
    """
    place = Path(traces["place"])
    groups = _groups(place)
    for group in groups:
        thaw(group)  # what is frozen does not die
    deadline = time.monotonic() + _PATIENCE_S
    while left := {*_started_for(place), *(member for group in groups for member in members(group))}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {sorted(left)} of {place} do not die")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if (first := FirstProcess.noted(place)) is not None and user_of(first.pid) == sandbox_uid():
        first.end(_PATIENCE_S)
    remove(groups)
    remove_scratch(place)


def _groups(place: Path) -> list[Path]:
    try:
        return [Path(line) for line in (place / GROUPS).read_text().splitlines()]
    except OSError:  # it was not started, or is gone
        return []


def _started_for(place: Path) -> list[int]:
    """The processes of the host, process 1 among them, one of whose words is the directory, which is theirs alone."""
    word = os.fsencode(place)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if word in words and user_of(int(entry.name)) in (os.geteuid(), sandbox_uid()):
                    found.append(int(entry.name))
    return found

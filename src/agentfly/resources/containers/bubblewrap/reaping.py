"""Removes what a process that died left of its containers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from agentfly.resources.cgroups import members, remove, thaw
from agentfly.resources.containers.bubblewrap.scratch import ATTENDANT, EXCHANGE, GROUPS, remove_scratch

_PATIENCE_S = 10.0


def reap(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a container name. Fine if it is gone already.

    Raises:
        OSError: a process of it does not die, or something of it cannot be removed.
    """
    home = Path(traces["scratch"])
    groups = [group for scratch in home.glob("*") for group in _groups(scratch)]
    for group in groups:
        thaw(group)  # what is frozen does not die
    deadline = time.monotonic() + _PATIENCE_S
    while (attendants := _started_for(home, ATTENDANT)) and time.monotonic() < deadline:
        for pid in attendants:  # who know what else there is, and end it before themselves
            _send(pid, signal.SIGTERM)
        time.sleep(0.01)
    for pid in _started_for(home, EXCHANGE):
        _send(pid, signal.SIGKILL)
    while time.monotonic() < deadline:
        left = {member for group in groups for member in members(group)}
        if not left:
            break
        for member in left:
            _send(member, signal.SIGKILL)
        time.sleep(0.01)
    remove(groups)
    remove_scratch(home)


def _groups(scratch: Path) -> list[Path]:
    """The control groups of one life of a sandbox."""
    try:
        return [Path(line) for line in (scratch / GROUPS).read_text().splitlines()]
    except OSError:  # it was not started, or is gone
        return []


def _started_for(home: Path, name: str) -> list[int]:
    """The programs that were started for a sandbox: they name a directory or file that is its alone."""
    named = re.compile(rb"(?:^|\0)" + re.escape(os.fsencode(home)) + rb"/\d+/" + re.escape(name.encode()) + rb"[/\0]")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if named.search((entry / "cmdline").read_bytes()):
                    found.append(int(entry.name))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

"""Removes what a process that died left of its containers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from agentfly.resources.containers.cgroups import members, remove
from agentfly.resources.containers.launcher import GROUPS
from agentfly.resources.containers.processes import start_time
from agentfly.resources.containers.trees import remove_scratch

_PATIENCE_S = 10.0


def reap(traces: dict[str, Any]) -> None:
    """Kill and remove exactly what the traces of a container name. Fine if it is gone already.

    Raises:
        OSError: a process of it does not die.
    """
    pid = traces.get("pid")
    if pid is not None and start_time(pid) == traces.get("start_time"):
        _kill(pid)
    scratch = Path(traces["scratch"])
    try:
        groups = [Path(line) for line in (scratch / GROUPS).read_text().splitlines()]
    except OSError:  # it was not started, or is gone
        groups = []
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        left = {member for group in groups for member in members(group)}
        if not left:
            break
        for member in left:
            _kill(member)
        time.sleep(0.01)
    remove(groups)
    remove_scratch(scratch)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

"""Removes what a process that died left of the programs that it had started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.errors import ResourceError
from agentfly.resources.descendants import TRACKERS_S, is_resource_tracker
from agentfly.resources.identity import start_time
from agentfly.resources.keeping.keeper import MARK
from agentfly.resources.tree_removal import remove_tree

_PATIENCE_S = 10.0


def reap(traces: Mapping[str, Any]) -> None:
    """End a keeper and all processes of its program, and remove their directory. Fine if they are gone already.

    A keeper ends by itself within a second of its process's death, with all that is below it. Should it have been
    killed itself, what the program had started is known by the directory, which is its alone.

    Raises:
        ResourceError: a process does not end.
        OSError: the directory cannot be removed.
    """
    directory = Path(traces["directory"])
    grave = directory.with_name(f"{directory.name}.reaped")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(grave)  # so that nothing can be started there any more
    began = time.monotonic()
    while left := _left(traces, (directory, grave)):
        waited = time.monotonic() - began
        if waited > _PATIENCE_S:
            raise ResourceError(f"The processes {left} of a kept program do not end, not even by SIGKILL.")
        for pid in left:
            if waited > TRACKERS_S or not is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    remove_tree(grave)


def _left(traces: Mapping[str, Any], directories: Sequence[Path]) -> list[int]:
    left = [pid for directory in directories for pid in running_in(directory)]
    pid = traces.get("pid")
    if pid is not None and start_time(pid) == traces["start_time"]:
        left.append(pid)
    return left


def running_in(directory: Path) -> list[int]:
    """The processes that run in this directory, or belong to it by their environment; zombies are none."""
    mark = f"{MARK}={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == directory or mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found

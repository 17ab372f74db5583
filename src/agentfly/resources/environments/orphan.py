"""Orphans: keepers whose process died without ending them, as the ledger tells."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GRACE_S = 2.0
"""Seconds a keeper may take to end everything below it."""


def reap(traces: Mapping[str, Any]) -> None:
    """End what an environment of a dead process left, if it is still there. The registered ``reap`` of the kind.

    A keeper ends by itself within a second of its process's death; this is for one that could not.
    """
    pid, started = traces.get("pid"), traces.get("start_time")
    if pid is None or start_time(pid) != started:
        return
    for sent, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        deadline = time.monotonic() + wait_s
        while start_time(pid) == started:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            return


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the id, its identity. None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything; what follows it is well formed (proc(5)).
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])

"""How many threads the model computes on, and how they wait for each other."""

from __future__ import annotations

import os
from pathlib import Path

SMALL_MODEL = 5_000_000
"""Below this many parameters one thread is fastest: handing work out costs more than it saves."""


def choose_threads(parameters: int) -> int:
    """The number of threads for a model of so many parameters.

    ``OMP_NUM_THREADS`` is respected if it is set. Otherwise it is the number of cores this process may use: of those
    its affinity allows, at most what the control group's CPU quota amounts to, hyper-threads counted once.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if parameters < SMALL_MODEL:
        return 1
    cpus = os.sched_getaffinity(0)
    cores = {_core(cpu) for cpu in cpus}
    return max(1, min(len(cores), int(_quota() or len(cores))))


def _core(cpu: int) -> str:
    """What all hyper-threads of a core have in common."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text()
    except OSError:
        return str(cpu)


def _quota() -> float | None:
    """CPUs that the control group grants, or None if it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)

"""The time to start a simulator in its own process: forked from a warmed parent, and in a new interpreter."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

from agentfly.resources.environments.environment import Environment
from agentfly.resources.environments.spec import EnvironmentSpec

IMPORTS = "asyncio, decimal, email.message, http.client, sqlite3, unittest.mock, xml.dom.minidom, zoneinfo"
"""Imports of the measured simulator's module, typical of a small simulator."""

_MODULE = "agentfly_measured_simulator"


def measure_environments(rounds: int = 20) -> dict[str, Any]:
    """Start, call and release a simulator with the imports of a small one, alternately by fork and by spawn.

    Args:
        rounds: number of simulators of each kind.

    Returns:
        Medians in milliseconds: ``fork_start_ms`` and ``spawn_start_ms``, until the simulator is created;
        ``call_ms``, one call; ``release_ms``. ``first_fork_start_ms`` includes the warming of the parent.
        ``start_ratio`` is a spawned start divided by a forked one.
    """
    with tempfile.TemporaryDirectory() as directory:
        module = Path(directory, f"{_MODULE}.py")
        module.write_text(f"import {IMPORTS}\n\n\nclass Simulator:\n    def step(self):\n        return 1\n")
        sys.path.insert(0, directory)
        try:
            return asyncio.run(_measure(rounds))
        finally:
            sys.path.remove(directory)


async def _measure(rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    first = await _one("fork", {})
    for _ in range(rounds):
        await _one("fork", times)
        await _one("spawn", times)
    result: dict[str, Any] = {"rounds": rounds, "first_fork_start_ms": round(first, 3)}
    result |= {f"{name}_ms": round(median(values), 3) for name, values in times.items()}
    result["start_ratio"] = round(median(times["spawn_start"]) / median(times["fork_start"]), 2)
    return result


async def _one(starts: Literal["fork", "spawn"], times: dict[str, list[float]]) -> float:
    """Return the milliseconds of the start of one instance."""
    spec = EnvironmentSpec(factory=f"{_MODULE}:Simulator", runs="process", starts=starts)
    simulator = Environment(spec, f"measured-{starts}")
    began = time.perf_counter()
    try:
        await simulator.start()
        started = time.perf_counter()
        await simulator.step()
        called = time.perf_counter()
    finally:
        await simulator.release()
    released = time.perf_counter()
    for name, seconds in (
        (f"{starts}_start", started - began),
        ("call", called - started),
        ("release", released - called),
    ):
        times.setdefault(name, []).append(seconds * 1e3)
    return (started - began) * 1e3

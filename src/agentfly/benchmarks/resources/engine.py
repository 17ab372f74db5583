"""Pool utilization: many rollouts that share few instances, against the exact optimum of the same work.

Each rollout waits for a known time, as for its first generation. It then holds an instance for its next tool calls and
generations, all of known length, and releases it. All rollouts hold an instance equally long. Then first come, first
served is an optimal schedule (jobs of equal length with release times on identical machines: whenever a machine is free
and a job has been released, it starts). The optimum is the end of that schedule, without any overhead.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.contexts.context import Context
from agentfly.core import signals
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.testing.fake_resource import FakeSpec

CAPACITIES = (8, 16, 32, 64)
TARGET_OCCUPANCY = 0.95


@dataclass(frozen=True)
class PoolWorkload:
    """Rollouts that share a pool.

    Args:
        rollouts: number of rollouts.
        longest_wait: each begins with a wait between 0 and this, in seconds.
        tools: seconds of the tool calls made while an instance is held.
        generations: seconds of the generations between them, while it is held too.
        seed: of the waits.
    """

    rollouts: int = 256
    longest_wait: float = 0.3
    tools: tuple[float, ...] = (0.1, 0.1)
    generations: tuple[float, ...] = (0.1,)
    seed: int = 0

    def waits(self) -> list[float]:
        """The seconds after which each rollout needs an instance."""
        generator = random.Random(self.seed)
        return [generator.uniform(0, self.longest_wait) for _ in range(self.rollouts)]

    @property
    def held(self) -> float:
        """Seconds for which each rollout holds its instance."""
        return sum(self.tools) + sum(self.generations)


def best_seconds(waits: Iterable[float], held: float, capacity: int) -> float:
    """Return the shortest possible time for all rollouts: the end of an optimal schedule.

    Args:
        waits: seconds from the start until each rollout needs an instance.
        held: seconds for which each needs it.
        capacity: how many instances there are.
    """
    free_from = [0.0] * capacity
    for wait in sorted(waits):
        heapq.heapreplace(free_from, max(wait, free_from[0]) + held)
    return max(free_from)


async def measure_pool(work: PoolWorkload, capacity: int) -> dict[str, float]:
    """Measure the work with a pool of `capacity` instances without start-up cost. Any lost time is the engine's.

    All instances exist from the start, because the time to start them depends on their kind.

    Returns:
        ``best_s``: see `best_seconds`. ``measured_s``: what it took. ``occupancy``: the one over the other.
        ``semaphore_s``: what the same took with an `asyncio.Semaphore` in place of the engine, which shows what this
        machine's clock and event loop lose by themselves.
    """
    waits = work.waits()
    semaphore = await _with_semaphore(work, waits, capacity)
    spec = FakeSpec(name=f"pool of {capacity}", capacity=capacity)
    with tempfile.TemporaryDirectory() as directory:
        async with ResourceEngine(ledger=Path(directory)) as engine:
            await _fill(engine, spec)
            began = time.perf_counter()
            await asyncio.gather(*(_roll_out(work, wait, spec, engine, n) for n, wait in enumerate(waits)))
            measured = time.perf_counter() - began
    best = best_seconds(waits, work.held, capacity)
    return {
        "best_s": round(best, 4),
        "measured_s": round(measured, 4),
        "semaphore_s": round(semaphore, 4),
        "occupancy": round(best / measured, 4),
    }


async def _fill(engine: ResourceEngine, spec: FakeSpec) -> None:
    """Start every instance of a pool and leave it idle."""
    leases = await asyncio.gather(*(engine.acquire(spec, f"first {number}") for number in range(spec.capacity)))
    for lease in leases:
        await engine.release(lease)
    while any(each.state != "idle" for pool in engine.snapshot().pools for each in pool.instances):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def _roll_out(work: PoolWorkload, wait: float, spec: FakeSpec, engine: ResourceEngine, number: int) -> None:
    context = Context(Trajectory(f"rollout {number}", f"group {number}", Task("work")), engine)
    try:
        await asyncio.sleep(wait)
        for turn, seconds in enumerate(work.tools):
            async with context.call() as call:
                await call.acquire(spec)
                await asyncio.sleep(seconds)
            if turn < len(work.generations):
                await asyncio.sleep(work.generations[turn])
    finally:
        await context.close()


async def _with_semaphore(work: PoolWorkload, waits: Sequence[float], capacity: int) -> float:
    semaphore = asyncio.Semaphore(capacity)

    async def one(wait: float) -> None:
        await asyncio.sleep(wait)
        async with semaphore:
            for turn, seconds in enumerate(work.tools):
                await asyncio.sleep(seconds)
                if turn < len(work.generations):
                    await asyncio.sleep(work.generations[turn])

    began = time.perf_counter()
    await asyncio.gather(*(one(wait) for wait in waits))
    return time.perf_counter() - began


def measure_occupancy(work: PoolWorkload | None = None, capacities: Sequence[int] = CAPACITIES) -> dict[str, Any]:
    """Measure the same work with pools of several sizes, one after the other.

    Returns:
        ``target``, ``rollouts``, ``held_s`` (by each), and by capacity under ``pools`` the result of `measure_pool`.
    """
    plan = work or PoolWorkload()

    async def measure_all() -> dict[str, dict[str, float]]:
        return {str(capacity): await measure_pool(plan, capacity) for capacity in capacities}

    return {
        "target": TARGET_OCCUPANCY,
        "rollouts": plan.rollouts,
        "held_s": round(plan.held, 4),
        "pools": signals.run_until_signal(measure_all()),
    }

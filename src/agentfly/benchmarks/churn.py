"""Churn: many short software engineering episodes, each in a clean sandbox.

An episode clones a repository, breaks it, runs its tests, repairs it and runs them again. Two sources of sandboxes are
measured alternately, on the same backend and by the same code. The first is a pool that the engine keeps warm, whose
sandboxes are reset in the background. The second starts a sandbox for each episode and removes it at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine

PROJECTS = {
    "inflection": ("inflection/__init__.py", "test_inflection.py"),
    "parse": ("parse.py", "tests"),
    "schema": ("schema.py", "test_schema.py"),
    "toolz": ("toolz/itertoolz.py", "toolz/tests/test_itertoolz.py"),
}
"""Repositories in ``/testbed``, each with a module of it and tests of that."""
_PATIENCE_S = 120.0
_numbers = itertools.count()


async def measure_episodes(spec: ContainerSpec) -> dict[str, Any]:
    """Measure episodes with and without the tests of their repositories, if the image has any.

    Args:
        spec: see `measure_churn`.

    Returns:
        ``churn`` and ``churn_with_tests``, what `measure_churn` gives; nothing if there is no ``/testbed``.
    """
    box = Container(spec, f"churn-{os.getpid()}-{next(_numbers)}")
    try:
        await box.start()
        found = await box.run("test -d /testbed")
    finally:
        await box.release()
    if found.exit_code:
        return {}
    return {
        "churn": await measure_churn(spec),
        "churn_with_tests": await measure_churn(spec, tests=True, episodes=12, rounds=1),
    }


async def measure_churn(
    spec: ContainerSpec,
    *,
    tests: bool = False,
    workers: int = 4,
    episodes: int = 24,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure episodes with a warm pool against a cold start for each.

    Args:
        spec: the sandboxes: an image with repositories in ``/testbed``. The pool has one for each worker, and as many
            that are being reset.
        tests: whether episodes run the tests of their repository.
        workers: episodes at a time.
        episodes: how many, in each round and way.
        rounds: how often the two ways take turns.

    Returns:
        Episodes a minute in both ways, their ratio, and what was measured.

    Raises:
        AssertionError: an episode did not go as it must: then nothing was measured.
        ResourceError: a sandbox failed.
    """
    pooled = replace(spec, capacity=2 * workers, warm=2 * workers)
    seconds = {"warm": 0.0, "cold": 0.0}
    with tempfile.TemporaryDirectory() as ledger:
        for _ in range(rounds):
            async with ResourceEngine(ledger=Path(ledger)) as engine:
                warm = _PooledEpisodes(engine, pooled)
                await warm.fill(2 * workers)
                seconds["warm"] += await _all(warm.episode, workers, episodes, tests=tests)
            cold = _FreshEpisodes(spec)
            seconds["cold"] += await _all(cold.episode, workers, episodes, tests=tests)
    rates = {f"{way}_episodes_per_minute": 60 * rounds * episodes / spent for way, spent in seconds.items()}
    return {
        "backend": spec.backend,
        "tests": tests,
        "workers": workers,
        "episodes": rounds * episodes,
        **{name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(seconds["cold"] / seconds["warm"], 2),
    }


Episode = Callable[[int, bool], Awaitable[None]]


class _PooledEpisodes:
    """Episodes in sandboxes that an engine gives."""

    def __init__(self, engine: ResourceEngine, spec: ContainerSpec) -> None:
        self._engine = engine
        self._spec = spec

    async def fill(self, sandboxes: int) -> None:
        """Have so many sandboxes started before anything is measured."""
        owners = [f"filler-{number}" for number in range(sandboxes)]
        leases = await asyncio.gather(*(self._engine.acquire(self._spec, owner) for owner in owners))
        await asyncio.gather(*(run_episode(lease.resource, n, tests=False) for n, lease in enumerate(leases)))
        await asyncio.gather(*(self._engine.release_owner(owner) for owner in owners))

    async def episode(self, number: int, tests: bool) -> None:
        owner = f"episode-{next(_numbers)}"
        lease = await self._engine.acquire(self._spec, owner)
        try:
            await run_episode(lease.resource, number, tests=tests)
        finally:
            await self._engine.release_owner(owner)


class _FreshEpisodes:
    """Episodes that start a sandbox each, and remove it."""

    def __init__(self, spec: ContainerSpec) -> None:
        self._spec = spec

    async def episode(self, number: int, tests: bool) -> None:
        box = Container(self._spec, f"churn-{os.getpid()}-{next(_numbers)}")
        try:
            await box.start()
            await run_episode(box, number, tests=tests)
        finally:
            await box.release()


async def run_episode(box: Container, number: int, *, tests: bool) -> None:
    """One episode, on the repository that its number comes to.

    Raises:
        AssertionError: it did not go as it must.
    """
    name, (module, tested) = list(PROJECTS.items())[number % len(PROJECTS)]
    await _expect(box, f"git clone --quiet --no-hardlinks /testbed/{name} work && cd work", succeeds=True)
    await _expect(box, f"echo 'raise RuntimeError(\"broken\")' >> {module}", succeeds=True)
    if tests:
        await _expect(box, f"python3 -m pytest -q -x {tested}", succeeds=False)
    await _expect(box, f"git checkout --quiet -- {module}", succeeds=True)
    if tests:
        await _expect(box, f"python3 -m pytest -q -x {tested}", succeeds=True)


async def _expect(box: Container, command: str, *, succeeds: bool) -> None:
    result = await box.run(command, timeout=_PATIENCE_S)
    if (result.exit_code == 0) is not succeeds:
        raise AssertionError(f"{command!r} was to {'succeed' if succeeds else 'fail'}, but: {result}")


async def _all(episode: Episode, workers: int, episodes: int, *, tests: bool) -> float:
    """Run episodes, some at a time; the seconds that they took together."""
    numbers = iter(range(episodes))

    async def work() -> None:
        for number in numbers:
            await episode(number, tests)

    before = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    return time.perf_counter() - before

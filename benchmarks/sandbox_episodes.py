"""``python -m benchmarks.sandbox_episodes``: many short software engineering episodes, each in a clean sandbox.

An episode clones a repository, breaks it, runs its tests, repairs it and runs them again. Two sources of sandboxes are
measured alternately, on the same backend and by the same code. The first is a pool that the engine keeps warm, whose
sandboxes are reset in the background. The second starts a sandbox for each episode and removes it at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from agentfly.benchmarks.resources.container_engines import ENGINES, measure_engine_backend
from agentfly.cli.main import run_function
from agentfly.core import signals
from agentfly.core.errors import ConfigError
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine
from tests.support.private_container_engines import PRIVATE_ENGINES, import_image

PROJECTS = {
    "inflection": ("inflection/__init__.py", "test_inflection.py"),
    "parse": ("parse.py", "tests"),
    "schema": ("schema.py", "test_tool_schema.py"),
    "toolz": ("toolz/itertoolz.py", "toolz/tests/test_itertoolz.py"),
}
"""Repositories in ``/testbed``; each with one of its modules and the tests of that module."""
_IMPORTED = "agentfly-bench"
_COMMAND_TIMEOUT_S = 120.0
_numbers = itertools.count()


async def measure_episodes(spec: ContainerSpec) -> dict[str, Any]:
    """Measure episodes without and with the tests of their repositories.

    Args:
        spec: see `measure_churn`.

    Returns:
        ``churn`` and ``churn_with_tests``, each a result of `measure_churn`. Empty if the image has no ``/testbed``.
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
        spec: the sandboxes. The image needs repositories in ``/testbed``. The pool has two sandboxes per worker: one
            in use and one being reset.
        tests: whether episodes run the tests of their repository.
        workers: number of concurrent episodes.
        episodes: number of episodes per round, for each of the two sources.
        rounds: how often the two sources alternate.

    Returns:
        Episodes per minute from the warm pool and from cold starts, their ratio, and the parameters.

    Raises:
        AssertionError: a command of an episode did not end as expected.
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
    """Episodes in sandboxes of an engine's pool."""

    def __init__(self, engine: ResourceEngine, spec: ContainerSpec) -> None:
        self._engine = engine
        self._spec = spec

    async def fill(self, sandboxes: int) -> None:
        """Start the given number of sandboxes before the measurement."""
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
    """Episodes that each start a sandbox and remove it."""

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
    """Run one episode. Its number selects the repository.

    Raises:
        AssertionError: a command did not end as expected.
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
    result = await box.run(command, timeout=_COMMAND_TIMEOUT_S)
    if (result.exit_code == 0) is not succeeds:
        raise AssertionError(f"{command!r} should {'succeed' if succeeds else 'fail'}. It returned {result}.")


async def _all(episode: Episode, workers: int, episodes: int, *, tests: bool) -> float:
    """Run episodes with the given number of workers. Return the elapsed seconds."""
    numbers = iter(range(episodes))

    async def work() -> None:
        for number in numbers:
            await episode(number, tests)

    before = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    return time.perf_counter() - before


@contextmanager
def private_engine(name: str, archive: Path) -> Iterator[str]:
    """Run a private container engine with an imported image, and make it the default engine of its backend.

    Args:
        name: ``docker`` or ``podman``.
        archive: a tar of a root file system.

    Yields:
        The name of the imported image.

    Raises:
        PrerequisiteError: the engine cannot run here, or rejects the archive.
    """
    variable, before = ENGINES[name], os.environ.get(ENGINES[name])
    with PRIVATE_ENGINES[name]() as address:
        import_image(address, archive, _IMPORTED)
        os.environ[variable] = address
        try:
            yield f"{_IMPORTED}:latest"
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


def sandbox_episodes(
    archive: Annotated[Path, typer.Argument(help="A root file system, as scripts/make_bench_image.py makes it.")],
    backend: Annotated[str, typer.Option(help="bubblewrap, docker or podman.")] = "bubblewrap",
) -> None:
    """Measure episodes per minute with a warm pool and with cold starts, and print them as JSON.

    Docker and Podman run as private engines, which needs root. Their containers are measured too, as by
    agentfly bench resources.
    """
    if not archive.exists():
        raise ConfigError(f"There is no file {archive}. Make one: python scripts/make_bench_image.py")
    if backend not in ("bubblewrap", *ENGINES):
        raise ConfigError(f"There is no backend {backend!r} to measure. Choose bubblewrap, {', '.join(ENGINES)}.")
    if backend == "bubblewrap":
        spec = ContainerSpec(image=str(archive.absolute()), memory="512MiB", pids=256, backend="bubblewrap")
        measured = signals.run_until_signal(measure_episodes(replace(spec, cpus=0)))
    else:
        with private_engine(backend, archive) as image:
            measured = measure_engine_backend(backend, image)
            spec = ContainerSpec(image=image, backend=backend, memory="512MiB")  # type: ignore[arg-type]
            measured |= signals.run_until_signal(measure_episodes(spec))
    typer.echo(json.dumps(measured, indent=2))


if __name__ == "__main__":
    run_function(sandbox_episodes)

"""What `agentfly bench resources` measures: the engine, the use of pools, and the containers of each backend."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from agentfly import interruption
from agentfly.errors import PrerequisiteError
from agentfly.resources.engine import ResourceEngine
from agentfly.testing.fake_resource import FakeSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

OWNERS = (1, 10, 100, 1_000, 10_000)
"""How many owners want one of `CAPACITY` instances at once."""

CAPACITY = 8
ROUNDS = 5


async def measure_engine() -> dict[str, Any]:
    """Acquire and release resources that cost nothing, so that what is measured is the engine alone.

    Returns:
        ``warm_us``: microseconds for one acquire and release while an idle instance is ready, the reset in the
        background not counted.
        ``cycle_us``: microseconds from one acquire to the next of a single owner on a pool of one, with release,
        reset, health check and hand-over.
        ``per_operation_us``: the same by number of owners who contend for a pool of eight, as each finishes and the
        next gets its turn.
        ``growth``: microseconds with 10,000 owners over those with 10.
    """
    with tempfile.TemporaryDirectory() as directory:
        async with ResourceEngine(ledger=Path(directory)) as engine:
            per_operation = {owners: await _contend(engine, owners) for owners in OWNERS}
            return {
                "warm_us": round(await _warm(engine), 2),
                "cycle_us": round(await _cycle(engine), 2),
                "per_operation_us": {str(owners): round(us, 2) for owners, us in per_operation.items()},
                "growth": round(per_operation[10_000] / per_operation[10], 3),
            }


async def _warm(engine: ResourceEngine, operations: int = 2_000) -> float:
    spec = FakeSpec(name="warm", capacity=2)
    times = []
    for number in range(operations):
        began = time.perf_counter()
        lease = await engine.acquire(spec, f"owner {number}")
        await engine.release(lease)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0)  # the reset, between two measurements
        await asyncio.sleep(0)
    return median(times) * 1e6


async def _cycle(engine: ResourceEngine, operations: int = 2_000) -> float:
    spec = FakeSpec(name="cycle", capacity=1)
    began = time.perf_counter()
    for number in range(operations):
        await engine.release(await engine.acquire(spec, f"owner {number}"))
    return (time.perf_counter() - began) / operations * 1e6


async def _contend(engine: ResourceEngine, owners: int) -> float:
    """The median over some rounds, in each of which every owner gets an instance once or more."""
    spec = FakeSpec(name=f"for {owners}", capacity=CAPACITY)
    turns = max(1, 2_000 // owners)

    async def owner(name: str) -> None:
        for _ in range(turns):
            await engine.release(await engine.acquire(spec, name))

    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await asyncio.gather(*(owner(f"owner {number}") for number in range(owners)))
        times.append((time.perf_counter() - began) / (owners * turns) * 1e6)
    return median(times)


def run_resources_bench() -> dict[str, Any]:
    """Measure the engine, how well pools are used, and every backend of containers that this machine can run.

    Returns:
        ``engine``: see `measure_engine`. ``occupancy``: see `agentfly.benchmarks.occupancy.measure_occupancy`.
        ``containers``: by backend, what `agentfly.benchmarks.sandboxes.BACKENDS` gives, or ``{"missing": why}``.
    """
    from agentfly.benchmarks import occupancy, sandboxes

    result: dict[str, Any] = {
        "engine": interruption.run(measure_engine()),
        "occupancy": occupancy.measure_occupancy(),
        "containers": {},
    }
    for name, measure in sandboxes.BACKENDS.items():
        try:
            result["containers"][name] = measure()
        except PrerequisiteError as error:
            result["containers"][name] = {"missing": str(error)}
    return result


def render(result: dict[str, Any]) -> RenderableType:
    """The measurements as tables for people."""
    from rich.console import Group

    tables = [_table("Resource engine", _engine_rows(result["engine"])), _occupancy_table(result["occupancy"])]
    for name, measured in result["containers"].items():
        if "missing" in measured:
            tables.append(f"Containers of {name} were not measured: {measured['missing']}")
        else:
            tables.append(_table(f"Containers of {name}", _container_rows(measured)))
    return Group(*tables)


def _engine_rows(engine: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("acquire + release, an instance ready", f"{engine['warm_us']:.1f} µs"),
        ("acquire, release, reset, hand over", f"{engine['cycle_us']:.1f} µs"),
        *(
            (f"the same, {int(owners):,} owners for {CAPACITY} instances", f"{us:.1f} µs each")
            for owners, us in engine["per_operation_us"].items()
        ),
        ("10,000 owners over 10", f"{engine['growth']:.2f} times"),
    ]


def _occupancy_table(occupancy: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    title = f"{occupancy['rollouts']} rollouts over pools (target {occupancy['target']:.0%} of the optimum)"
    table = Table(title=title, title_justify="left")
    for heading in ("pool", "best s", "measured s", "with a semaphore s", "occupancy"):
        table.add_column(heading, justify="right")
    for capacity, row in occupancy["pools"].items():
        seconds = (f"{row[name]:.3f}" for name in ("best_s", "measured_s", "semaphore_s"))
        table.add_row(capacity, *seconds, f"{row['occupancy']:.1%}")
    return table


def _container_rows(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """One row a figure: milliseconds, ratios to the bare program, and what many at once take."""
    rows = []
    for name, value in measured.items():
        if name == "many":
            rows += [(f"{value['count']} alive at once: {part.replace('_', ' ')}", str(value[part])) for part in value]
        elif name.endswith("_ms"):
            rows.append((name.removesuffix("_ms").replace("_", " "), f"{value:.3f} ms"))
        elif "_over_" in name:
            rows.append((name.replace("_", " "), f"{value:.2f} times"))
        else:
            rows.append((name.replace("_", " "), str(value)))
    return rows


def _table(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table

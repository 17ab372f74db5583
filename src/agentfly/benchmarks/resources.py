"""What the resource engine costs, and what a sandbox costs beside the bare program."""

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
    """Measure the engine, and the sandboxes if this machine can run them.

    Returns:
        ``engine``: see `measure_engine`. ``sandboxes``: see `agentfly.benchmarks.sandboxes.measure_sandboxes`, or
        ``{"missing": why}``.
    """
    from agentfly.benchmarks.sandboxes import measure_sandboxes

    result: dict[str, Any] = {"engine": interruption.run(measure_engine())}
    try:
        result["sandboxes"] = measure_sandboxes()
    except PrerequisiteError as error:
        result["sandboxes"] = {"missing": str(error)}
    return result


def render(result: dict[str, Any]) -> RenderableType:
    """The measurements as tables for people."""
    from rich.console import Group

    engine, sandboxes = result["engine"], result["sandboxes"]
    rows = [
        ("acquire + release, an instance ready", f"{engine['warm_us']:.1f} µs"),
        ("acquire, release, reset, hand over", f"{engine['cycle_us']:.1f} µs"),
        *(
            (f"the same, {int(owners):,} owners for {CAPACITY} instances", f"{us:.1f} µs each")
            for owners, us in engine["per_operation_us"].items()
        ),
        ("10,000 owners over 10", f"{engine['growth']:.2f} times"),
    ]
    if "missing" in sandboxes:
        return Group(_table("Resource engine", rows), f"Sandboxes were not measured: {sandboxes['missing']}")
    measured = [(name.replace("_", " "), str(value)) for name, value in sandboxes.items()]
    return Group(_table("Resource engine", rows), _table("Sandboxes", measured))


def _table(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table

"""``agentfly bench resources``: the engine, the occupancy of pools, environments, and containers of each backend."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from agentfly.core import signals
from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.testing.fake_resource import FakeSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

OWNERS = (1, 10, 100, 1_000, 10_000)
"""Numbers of owners that contend for `CAPACITY` instances."""

CAPACITY = 8
ROUNDS = 5


async def measure_engine() -> dict[str, Any]:
    """Measure the engine alone: acquire and release resources that cost nothing.

    Returns:
        ``warm_us``: microseconds for one acquire and release with an idle instance ready. The background reset is
        not counted.
        ``cycle_us``: microseconds from one acquire to the next by a single owner on a pool of one. It includes
        release, reset, health check and grant.
        ``per_operation_us``: the same for each number of owners that contend for a pool of eight.
        ``growth``: ``per_operation_us`` with 10,000 owners divided by the value with 10.
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
    """Return the median over several rounds. Every owner acquires an instance at least once per round."""
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


PARTS = ("engine", "occupancy", "environments", "bubblewrap", "docker", "podman")
"""The parts that can be measured, in order."""


def run_resources_bench(parts: Collection[str] = PARTS, image: str | None = None) -> dict[str, Any]:
    """Measure the engine, the occupancy of pools, environments, and the containers of each backend.

    Args:
        parts: the parts to measure, some of `PARTS`.
        image: the name of an image that docker and podman have. Without one, they are not measured.

    Returns:
        The measurements of each part. ``engine``: see `measure_engine`.
        ``occupancy``: see `agentfly.benchmarks.resources.engine`. ``environments``: see
        `agentfly.benchmarks.resources.environments`. The backends: see
        `agentfly.benchmarks.resources.sandboxes` and `agentfly.benchmarks.resources.container_engines`. A part that
        cannot be measured here is ``{"missing": reason}``.

    Raises:
        ConfigError: a part is unknown.
    """
    from agentfly.benchmarks.resources import container_engines, environments, sandboxes
    from agentfly.benchmarks.resources import engine as occupancy

    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"There is no part {unknown[0]!r} to measure. The parts are {', '.join(PARTS)}.")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": lambda: signals.run_until_signal(measure_engine()),
        "occupancy": occupancy.measure_occupancy,
        "environments": environments.measure_environments,
        "bubblewrap": sandboxes.measure_bubblewrap,
        **container_engines.measures_of(image),
    }
    result: dict[str, Any] = {}
    for part in PARTS:
        if part in parts:
            try:
                result[part] = measures[part]()
            except PrerequisiteError as error:
                result[part] = {"missing": str(error)}
    return result


def render(result: dict[str, Any]) -> RenderableType:
    """Return the measurements as tables."""
    from rich.console import Group

    return Group(*(_render_part(part, measured) for part, measured in result.items()))


def _render_part(part: str, measured: dict[str, Any]) -> RenderableType:
    title = {"engine": "Resource engine", "environments": "Environments in processes"}
    if "missing" in measured:
        return f"{part} was not measured: {measured['missing']}\n"
    if part == "occupancy":
        return _occupancy_table(measured)
    rows = _engine_rows(measured) if part == "engine" else _container_rows(measured)
    return _table(title.get(part, f"Containers of {part}"), rows)


def _engine_rows(engine: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("acquire + release, an instance ready", f"{engine['warm_us']:.1f} µs"),
        ("acquire, release, reset, hand over", f"{engine['cycle_us']:.1f} µs"),
        *(
            (f"the same, {int(owners):,} owners for {CAPACITY} instances", f"{us:.1f} µs each")
            for owners, us in engine["per_operation_us"].items()
        ),
        ("one operation with 10,000 owners, over one with 10 (target: at most 2)", f"{engine['growth']:.2f} times"),
    ]


def _occupancy_table(occupancy: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    title = f"{occupancy['rollouts']} rollouts over pools (target {occupancy['target']:.0%} of the optimum)"
    caption = "Other work on the machine changes these figures: measure while it is idle."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("pool", "best s", "measured s", "with a semaphore s", "occupancy"):
        table.add_column(heading, justify="right")
    for capacity, row in occupancy["pools"].items():
        seconds = (f"{row[name]:.3f}" for name in ("best_s", "measured_s", "semaphore_s"))
        table.add_row(capacity, *seconds, f"{row['occupancy']:.1%}")
    return table


def _container_rows(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return one row per figure: milliseconds, ratios to the bare program, and figures of many containers at once."""
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

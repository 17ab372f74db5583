"""Measurements of a workload: wall time against the optimum, CPU time per turn, and memory per rollout."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.benchmarks.rollouts.timed_policy import TimedPolicy
from agentfly.benchmarks.rollouts.workload import WORKLOADS, RolloutPlan, SandboxPool, Uniform, Workload
from agentfly.contexts.context import Context
from agentfly.core import signals
from agentfly.core.errors import ConfigError
from agentfly.core.events import Event, EventStream
from agentfly.core.gc_tuning import tuned_gc
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec

MAX_CPU_MS_PER_TURN = 0.5
"""Target of the processor time without the tokenizer, with every event recorded."""

MAX_SYNC_POINTS = 2.0
"""Target of the efficiency that sync tools may lose against async tools, in percentage points."""

MAX_KB_PER_ROLLOUT = 200
"""Target of the memory of a running rollout without its tokens, in kB."""


@dataclass(frozen=True)
class Measurement:
    """The measurements of one workload.

    Attributes:
        best_seconds: the best possible wall time; see `Workload.best_seconds`.
        bare_seconds: time of the same sleeps in bare asyncio, without a pool: the loss by machine and event loop.
        efficiency: best possible time / measured time.
        cpu_ms_per_turn: processor time of this process per turn, without the tokenizer's.
        tokenizer_ms_per_turn: processor time of the tokenizer per turn.
        model_calls, needed_model_calls: generations made, and generations that the workload needs.
        events: number of recorded events.
        failed: rollouts that did not end as planned.
    """

    workload: str
    rollouts: int
    turns: int
    best_seconds: float
    bare_seconds: float
    measured_seconds: float
    efficiency: float
    target: float
    cpu_ms_per_turn: float
    tokenizer_ms_per_turn: float
    model_calls: int
    needed_model_calls: int
    events: int
    failed: int


async def measure(workload: Workload) -> Measurement:
    """Run a workload once and compare it with the best possible time."""
    plans = workload.plans()
    bare = await _bare_seconds(plans)
    model, events = TimedPolicy(plans), EventStream()
    recorded: list[Event] = []
    async with open_runner(workload, plans, model, events) as runner:
        await runner.collect(
            tasks_of(plans)[:1], label="first"
        )  # what happens once in a process is not what is measured
        model.calls = 0
        model.tokenizer.start_recording()
        gc.collect()
        with events.subscribed(recorded.append), tuned_gc():  # as in every run
            cpu, started = time.process_time(), time.perf_counter()
            trajectories = await runner.collect(tasks_of(plans), label=workload.name)
            measured, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokenizer = model.tokenizer.cpu_seconds()
    turns = sum(len(plan.generations) for plan in plans)
    best = workload.best_seconds(plans)
    return Measurement(
        workload=workload.name,
        rollouts=len(plans),
        turns=turns,
        best_seconds=best,
        bare_seconds=bare,
        measured_seconds=measured,
        efficiency=best / measured,
        target=workload.target,
        cpu_ms_per_turn=1000 * (cpu - tokenizer) / turns,
        tokenizer_ms_per_turn=1000 * tokenizer / turns,
        model_calls=model.calls,
        needed_model_calls=turns,
        events=len(recorded),
        failed=sum(
            trajectory.reward != 1.0 or len(trajectory.turns) != len(plan.generations)
            for trajectory, plan in zip(trajectories, plans, strict=True)
        ),
    )


async def memory_kb_per_rollout(rollouts: int = 1024) -> float:
    """Return the memory of Python objects per running rollout, without its tokens, in kB.

    Each rollout has made four tool calls and waits for its fifth generation. A second measurement with far fewer
    rollouts is subtracted, to exclude memory that does not depend on their number.
    """
    few = rollouts // 16
    return (await _held_bytes(rollouts) - await _held_bytes(few)) / (rollouts - few) / 1000


async def measure_async_and_sync(workload: Workload, repeats: int) -> dict[str, Any]:
    """Measure a workload with async tools and the same with sync tools, alternately.

    Each result is the median by efficiency. ``sync_points`` is the difference of the efficiencies in percentage points.
    A workload that mixes both kinds is measured once.
    """
    as_it_is: list[Measurement] = []
    with_sync: list[Measurement] = []
    for _ in range(repeats):
        as_it_is.append(await measure(workload))
        if not workload.sync_share:
            with_sync.append(await measure(replace(workload, sync_share=1.0)))
    result = asdict(_median(as_it_is))
    if not with_sync:
        return result
    points = [100 * (one.efficiency - sync.efficiency) for one, sync in zip(as_it_is, with_sync, strict=True)]
    return result | {"with_sync_tools": asdict(_median(with_sync)), "sync_points": statistics.median(points)}


def _median(measurements: Sequence[Measurement]) -> Measurement:
    return sorted(measurements, key=lambda one: one.efficiency)[len(measurements) // 2]


def run_rollouts_bench(names: Sequence[str] | None = None, repeats: int = 1) -> dict[str, Any]:
    """Measure workloads by name, or all, and the memory. The result is a JSON value.

    Args:
        names: the workloads.
        repeats: number of measurements of each; the median is reported.

    Raises:
        ConfigError: a workload is unknown, or there is nothing to measure.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: a workload is measured at least once.")
    known = {workload.name: workload for workload in WORKLOADS}
    if unknown := [name for name in names or () if name not in known]:
        raise ConfigError(f"There is no workload {unknown[0]!r}; known are {', '.join(known)}.")
    chosen = [known[name] for name in names or known]

    async def measure_all() -> dict[str, Any]:
        return {
            "workloads": [await measure_async_and_sync(workload, repeats) for workload in chosen],
            "max_sync_points": MAX_SYNC_POINTS,
            "max_cpu_ms_per_turn": MAX_CPU_MS_PER_TURN,
            "kb_per_rollout": round(await memory_kb_per_rollout(), 1),
            "max_kb_per_rollout": MAX_KB_PER_ROLLOUT,
        }

    return signals.run_until_signal(measure_all())


@asynccontextmanager
async def open_runner(
    workload: Workload, plans: Sequence[RolloutPlan], model: TimedPolicy, events: EventStream
) -> AsyncIterator[Runner]:
    """Return a runner whose model, tools, reward and sandboxes have the latencies of the plans."""
    spec = _sandboxes(workload.pool) if workload.pool else None

    @tool
    async def work(turn: int, context: Context) -> str:
        """Do some work that takes a known time.

        Args:
            turn: number of the turn.
        """
        if spec is not None:
            await context.acquire(spec)
        await asyncio.sleep(plans[context.task["number"]].tools[turn])
        return "done"

    @tool
    def toil(turn: int, context: Context) -> str:
        """Do some work that takes a known time, on a thread.

        Args:
            turn: number of the turn.
        """
        if spec is not None:
            context.wait(context.acquire(spec))
        time.sleep(plans[context.task["number"]].tools[turn])
        return "done"

    @reward
    async def look(number: int) -> float:
        await asyncio.sleep(plans[number].reward)
        return 1.0

    agent = Agent(model="timed", tools=[work, toil], tool_prompt="", max_turns=workload.turns[1])
    starts = workload.pool.capacity if workload.pool else 1
    with tempfile.TemporaryDirectory() as ledger:
        engine = ResourceEngine(ledger=Path(ledger), events=events, max_concurrent_starts=starts)
        runner = Runner(
            agent,
            policy=model,
            engine=engine,
            reward=look,
            events=events,
            max_concurrent_rollouts=workload.rollouts,
        )
        async with engine, runner:
            yield runner


def _sandboxes(pool: SandboxPool) -> FakeSpec:
    async def take_time(operation: str, _: str) -> None:
        if operation == "start":
            await asyncio.sleep(pool.start_seconds)

    return FakeSpec(world=FakeBackend(take_time), capacity=pool.capacity)


def tasks_of(plans: Sequence[RolloutPlan]) -> list[Task]:
    """A task for each plan, which holds the plan's number."""
    return [Task(f"Rollout {number}", {"number": number}, str(number)) for number in range(len(plans))]


async def _bare_seconds(plans: Sequence[RolloutPlan]) -> float:
    async def one(plan: RolloutPlan) -> None:
        for seconds in (*plan.generations, *plan.tools, plan.reward):
            await asyncio.sleep(seconds)

    started = time.perf_counter()
    await asyncio.gather(*map(one, plans))
    return time.perf_counter() - started


async def _held_bytes(rollouts: int) -> float:
    """Return the memory of ``count`` rollouts in the middle of their work, without their tokens."""
    turns = 5
    at_once = Uniform(0, 0)
    workload = Workload("memory", rollouts, (turns, turns), at_once, at_once, at_once, target=1.0)
    plans = workload.plans()
    model = TimedPolicy(plans)
    model.held_turn = turns - 1
    async with open_runner(workload, plans, model, EventStream()) as runner:
        gc.collect()
        tracemalloc.start()
        try:
            running: list[Trajectory] = []
            collecting = asyncio.create_task(runner.collect(tasks_of(plans), label="memory"))
            while model.calls < rollouts * turns and not collecting.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        model.hold.set()
        running = await collecting
    return held - sum(_token_bytes(sequence) for trajectory in running for sequence in trajectory.sequences)


def _token_bytes(sequence: TokenSequence) -> int:
    columns = (sequence.ids, sequence.origins, sequence.logprobs, sequence.raw_logprobs, sequence.versions)
    return sum(column.itemsize * len(column) for column in columns)


_HEADINGS = ("", "rollouts", "turns", "best s", "bare s", "measured", "efficiency", "target", "CPU ms", "calls")


def render(result: dict[str, Any]) -> Group:
    """Return a table with one row per workload, another for its sync tools, and the memory below."""
    table = Table(title="Rollouts: best possible time / measured time", pad_edge=False, padding=(0, 1, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in result["workloads"]:
        table.add_row(row["workload"], *_columns(row))
        if sync := row.get("with_sync_tools"):
            table.add_row(f"{row['workload']} sync", *_columns(sync))
    points = ", ".join(
        f"{row['workload']} {row['sync_points']:+.1f}" for row in result["workloads"] if "sync_points" in row
    )
    points = points or "(not measured)"
    return Group(
        table,
        "Bare is the same waits in asyncio alone; calls are those of the model, over those that are needed.",
        f"Sync is the same work with sync functions as tools, measured in turns. Async tools are faster by {points} "
        f"points of efficiency (target at most {result['max_sync_points']:g}).",
        f"CPU is a turn's: target below {result['max_cpu_ms_per_turn']} ms beside the tokenizer, every event recorded.",
        f"Memory of a running rollout beside its tokens: {result['kb_per_rollout']:.1f} kB "
        f"(target below {result['max_kb_per_rollout']} kB).",
    )


def _columns(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["rollouts"]),
        str(row["turns"]),
        f"{row['best_seconds']:.3f}",
        f"{row['bare_seconds']:.3f}",
        f"{row['measured_seconds']:.3f}",
        f"{row['efficiency']:.1%}",
        f"{row['target']:.0%}",
        f"{row['cpu_ms_per_turn']:.2f}",
        f"{row['model_calls'] / row['needed_model_calls']:.0%}",
    )

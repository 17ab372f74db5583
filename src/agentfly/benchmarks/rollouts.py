"""How close the rollout layer comes to the best possible time, on work whose length is known exactly.

Every generation and every tool call of a workload takes a given time, so the best possible wall time is known: each
rollout waits only for itself, and the batch takes as long as its longest rollout. Efficiency is that time divided by
the measured one; the rest is what the framework adds.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from agentfly import interruption
from agentfly.agents.agent import Agent
from agentfly.agents.tool import tool
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.contexts.context import Context
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.runner import Runner
from agentfly.task import Task

TARGET_EFFICIENCY = 0.97


@dataclass(frozen=True)
class Workload:
    """A seeded batch of scripted rollouts.

    Attributes:
        name: the workload's letter.
        rollouts: how many run at once.
        turns: the fewest and the most generations of a rollout.
        model_seconds: how long each generation takes.
        tool_seconds: the shortest and the longest tool call.
    """

    name: str
    rollouts: int
    turns: tuple[int, int]
    model_seconds: float
    tool_seconds: tuple[float, float]
    seed: int = 0

    def tasks(self) -> list[Task]:
        """One task a rollout, holding how long each of its tool calls takes; the last turn has none."""
        generator = random.Random(self.seed)
        return [
            Task(
                prompt=f"Rollout {index}",
                fields={
                    "tool_seconds": [
                        generator.uniform(*self.tool_seconds) for _ in range(generator.randint(*self.turns) - 1)
                    ]
                },
                id=str(index),
            )
            for index in range(self.rollouts)
        ]

    def best_seconds(self, tasks: Sequence[Task]) -> float:
        """The exact time of the longest rollout, with nothing added to it."""
        rollouts: list[list[float]] = [task["tool_seconds"] for task in tasks]
        return max(sum(waits) + (len(waits) + 1) * self.model_seconds for waits in rollouts)


WORKLOADS = (Workload("A", rollouts=64, turns=(1, 9), model_seconds=0.1, tool_seconds=(0.005, 0.05)),)


@dataclass(frozen=True)
class Measurement:
    """What one workload took.

    Attributes:
        efficiency: best possible time / measured time.
        cpu_ms_per_turn: processor time of this process a turn, the scripted model's included.
        model_calls, needed_model_calls: generations made, and generations that the workload needs.
    """

    workload: str
    rollouts: int
    turns: int
    best_seconds: float
    measured_seconds: float
    efficiency: float
    cpu_ms_per_turn: float
    model_calls: int
    needed_model_calls: int


@tool
async def work(turn: int, context: Context) -> str:
    """Do some work that takes a known time.

    Args:
        turn: number of the turn.
    """
    await asyncio.sleep(context.task["tool_seconds"][turn])
    return "done"


async def measure(workload: Workload) -> Measurement:
    """Run a workload once and compare it with the best possible time."""
    tasks = workload.tasks()
    calls = 0

    def script(prompt: str, turn: int) -> str:
        nonlocal calls
        calls += 1
        found = re.search(r"Rollout (\d+)", prompt)
        remaining = tasks[int(found[1])]["tool_seconds"] if found else []
        return HermesFormat().write("work", {"turn": turn}) if turn < len(remaining) else "finished"

    agent = Agent(model="scripted", tools=[work], tool_prompt="", max_turns=workload.turns[1])
    async with Runner(agent, policy=ScriptedPolicy(script, seconds=workload.model_seconds)) as runner:
        await runner.collect(tasks[:1])  # what happens once in a process is not what is measured
        calls = 0
        cpu, started = time.process_time(), time.perf_counter()
        trajectories = await runner.collect(tasks)
        measured, cpu = time.perf_counter() - started, time.process_time() - cpu
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    best = workload.best_seconds(tasks)
    return Measurement(
        workload=workload.name,
        rollouts=workload.rollouts,
        turns=turns,
        best_seconds=best,
        measured_seconds=measured,
        efficiency=best / measured,
        cpu_ms_per_turn=1000 * cpu / turns,
        model_calls=calls,
        needed_model_calls=sum(len(task["tool_seconds"]) + 1 for task in tasks),
    )


def run_rollouts_bench() -> dict[str, Any]:
    """Measure every workload; the result is JSON-able."""

    async def measure_all() -> list[Measurement]:
        return [await measure(workload) for workload in WORKLOADS]

    return {
        "target_efficiency": TARGET_EFFICIENCY,
        "workloads": [asdict(measurement) for measurement in interruption.run(measure_all())],
    }


def render(result: dict[str, Any]) -> Table:
    """The result as a table for people."""
    table = Table(title=f"Rollouts: best possible time / measured time (target {result['target_efficiency']:.0%})")
    for heading in (
        "workload",
        "rollouts",
        "turns",
        "best s",
        "measured s",
        "efficiency",
        "CPU ms/turn",
        "model calls",
    ):
        table.add_column(heading, justify="right")
    for row in result["workloads"]:
        table.add_row(
            row["workload"],
            str(row["rollouts"]),
            str(row["turns"]),
            f"{row['best_seconds']:.3f}",
            f"{row['measured_seconds']:.3f}",
            f"{row['efficiency']:.1%}",
            f"{row['cpu_ms_per_turn']:.2f}",
            f"{row['model_calls']} of {row['needed_model_calls']}",
        )
    return table

"""The bench of rollouts: the optimum is exact, and the measurements are complete."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from agentfly.benchmarks.rollouts import measure
from agentfly.benchmarks.rollouts.measure import render
from agentfly.benchmarks.rollouts.workload import WORKLOADS, LogNormal, RolloutPlan, SandboxPool, Uniform, Workload
from agentfly.core.errors import ConfigError
from tests.support.virtual_time import run_in_virtual_time

SMALL = Workload("S", 6, (1, 4), Uniform(0.1, 0.2), Uniform(0.01, 0.3), Uniform(0.01, 0.02), target=0.9)


def test_a_workload_is_the_same_whenever_it_is_planned():
    for workload in WORKLOADS:
        assert workload.plans() == workload.plans()
        assert len(workload.plans()) == workload.rollouts


def test_a_latency_never_passes_its_cap_and_half_of_it_is_below_the_median():
    workload = replace(SMALL, rollouts=2000, tools=LogNormal(0.3, cap=2))
    drawn = sorted(seconds for plan in workload.plans() for seconds in plan.tools)
    assert drawn[-1] == 2
    assert drawn[len(drawn) // 2] == pytest.approx(0.3, rel=0.1)


def test_the_best_time_without_a_pool_equals_the_longest_rollout():
    plans = [RolloutPlan((1.0, 2.0), (0.5,), (False,), 0.25), RolloutPlan((1.0,), (), (), 0.25)]
    assert SMALL.best_seconds(plans) == 3.75


def test_the_best_time_through_a_pool_serves_in_order_starts_as_asked_and_hands_on_at_once():
    one = RolloutPlan((1.0, 1.0), (2.0,), (False,), 0.0)
    workload = replace(SMALL, pool=SandboxPool(2, 0.5))
    assert workload.best_seconds([one, one]) == 1.0 + 0.5 + 3.0
    assert workload.best_seconds([one, one, one]) == 1.0 + 0.5 + 3.0 + 3.0
    late = RolloutPlan((5.0, 1.0), (2.0,), (False,), 0.0)
    assert workload.best_seconds([one, late]) == 5.0 + 3.0  # no start is waited for: the first one's is back by then


@pytest.mark.parametrize("pool", [None, SandboxPool(2, 0.5)], ids=["alone", "through a pool"])
def test_where_nothing_costs_time_a_workload_takes_the_best_possible_time(pool):
    workload = replace(SMALL, pool=pool)
    plans = workload.plans()

    async def seconds() -> float:
        clock = asyncio.get_running_loop().time
        async with measure.open_runner(workload, plans, measure.TimedPolicy(plans), measure.EventStream()) as runner:  # type: ignore[attr-defined]
            started = clock()
            await runner.collect(measure.tasks_of(plans), label="virtual")
            return clock() - started

    assert run_in_virtual_time(seconds()) == pytest.approx(workload.best_seconds(plans), abs=1e-6)


@pytest.mark.slow
def test_the_bench_makes_the_calls_that_are_needed_and_every_rollout_ends_as_planned(monkeypatch):
    mixed = replace(SMALL, name="M", sync_share=0.5, pool=SandboxPool(2, 0.05))
    monkeypatch.setattr(measure, "WORKLOADS", (SMALL, mixed))
    monkeypatch.setattr(measure.memory_kb_per_rollout, "__defaults__", (64,))
    result = json.loads(json.dumps(measure.run_rollouts_bench(repeats=2)))
    rows = result["workloads"]
    assert [row["workload"] for row in rows] == ["S", "M"]
    both = [rows[0], rows[0]["with_sync_tools"], rows[1]]
    for row in both:
        assert row["model_calls"] == row["needed_model_calls"] == row["turns"]
        assert row["failed"] == 0
        assert row["events"] > row["turns"]
    assert "with_sync_tools" not in rows[1]
    assert result["kb_per_rollout"] > 0
    console = Console(file=io.StringIO(), width=140)
    console.print(render(result))
    for row in both:
        assert f"{row['efficiency']:.1%}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{rows[0]['sync_points']:+.1f}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_with_sync_tools_the_work_is_the_same():
    async_tools, sync_tools = SMALL.plans(), replace(SMALL, sync_share=1.0).plans()
    assert [replace(plan, sync=()) for plan in async_tools] == [replace(plan, sync=()) for plan in sync_tools]
    assert {sync for plan in async_tools for sync in plan.sync} == {False}
    assert {sync for plan in sync_tools for sync in plan.sync} == {True}


def test_a_workload_that_there_is_not_is_refused_naming_those_there_are():
    with pytest.raises(ConfigError, match=r"'G'.*A, B, C, D, E, F"):
        measure.run_rollouts_bench(["A", "G"])

"""Thousands of rollouts in one process: each waits only for its own needs, and costs little."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.task import Task
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time


def in_virtual_time(scene, tmp_path, *, capacity, **settings):
    box = FakeSpec(world=FakeBackend(), name="box", capacity=capacity)

    @tool
    async def use(context: Context) -> str:
        """Use the box."""
        await context.acquire(box)
        await asyncio.sleep(1)
        return "used"

    async def main():
        agent = Agent(model="scripted", tools=[use])
        policy = ScriptedPolicy([agent.format.write("use", {}), "Done."], seconds=1)
        async with (
            ResourceEngine(ledger=tmp_path, max_concurrent_starts=capacity) as engine,
            Runner(agent, policy=policy, engine=engine, **settings) as runner,
        ):
            return await scene(runner)

    return run_in_virtual_time(main())


@pytest.mark.slow
def test_thousands_of_rollouts_share_a_pool_and_keep_it_busy_to_the_end(tmp_path):
    async def scene(runner):
        began = asyncio.get_running_loop().time()
        found = await runner.collect([Task(f"task {number}") for number in range(2400)])
        return [one.finish_reason for one in found], asyncio.get_running_loop().time() - began

    finishes, seconds = in_virtual_time(scene, tmp_path, capacity=400, max_concurrent_rollouts=2400)
    assert finishes == ["answered"] * 2400
    assert seconds == pytest.approx(1 + 2400 / 400 * 2, abs=0.5)  # a box is held for a call and the turn after it


def test_a_million_rollouts_that_wait_cost_nothing_until_they_begin(tmp_path):
    async def scene(runner):
        tracemalloc.start()
        try:
            batch = runner.batch((Task(f"task {number}") for number in range(1_000_000)), attempts=8)
            await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[0] < 2_000_000
        finally:
            tracemalloc.stop()
        assert len(asyncio.all_tasks()) < 20
        await batch.close()

    in_virtual_time(scene, tmp_path, capacity=4, max_concurrent_rollouts=8)


@pytest.mark.slow
def test_a_running_rollout_takes_less_than_200_kb_beside_its_tokens(tmp_path):
    async def scene(runner):
        await runner.collect([Task("what happens once in a process is not what is measured")])
        gc.collect()
        tracemalloc.start()
        try:
            batch = runner.batch([Task(f"task {number}") for number in range(300)])
            await asyncio.sleep(1.5)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        running = batch.progress.running
        await batch.close()
        return held / running, running

    each, running = in_virtual_time(scene, tmp_path, capacity=300, max_concurrent_rollouts=300)
    assert running == 300
    assert each < 200_000

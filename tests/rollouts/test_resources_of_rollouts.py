"""Resources of rollouts: frozen while the model generates, and counted in the run's metrics."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError
from agentfly.core.task import to_tasks
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.backlog import PREFETCH_TASKS
from agentfly.rollouts.run import run
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


@pytest.fixture
def world():
    async def behave(operation, instance):
        if operation == "use":
            await asyncio.sleep(0.05)

    return FakeBackend(behave)


def agent_using(spec):
    @tool
    async def work(context: Context) -> str:
        """Do some work."""
        box = await context.acquire(spec)
        await box.use()
        await box.use()
        return "done"

    return Agent(model="scripted", tools=[work])


SCRIPT = [HermesFormat().write("work", {}), HermesFormat().write("work", {}), "Finished."]


@pytest.mark.slow
async def test_a_rollouts_instance_is_frozen_while_the_model_thinks_and_runs_for_its_calls(world, tmp_path):
    agent = agent_using(FakeSpec(world=world, idle="freeze", idle_timeout_s=None))
    async with ResourceEngine(ledger=tmp_path) as engine:
        result = await run(agent, ["Go."], policy=ScriptedPolicy(SCRIPT, seconds=0.3), engine=engine)
    assert [call.observation for turn in result.trajectories[0].turns for call in turn.tool_results] == ["done", "done"]
    done = [operation for operation, _ in world.history if operation in ("use", "freeze", "thaw")]
    assert done[:7] == ["use", "use", "freeze", "thaw", "use", "use", "freeze"]


async def test_a_run_says_how_many_resources_may_start_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path))
    starting = [0, 0]  # now, and the most so far

    async def behave(operation, instance):
        if operation == "start":
            starting[0] += 1
            starting[1] = max(starting)
            try:
                await asyncio.sleep(0.01)
            finally:
                starting[0] -= 1

    for most, settings in ((2, {"max_concurrent_starts": 2}), (6, {})):
        starting[:] = 0, 0
        agent = agent_using(FakeSpec(world=FakeBackend(behave), capacity=6))
        result = await run(agent, ["Go."] * 6, policy=ScriptedPolicy(SCRIPT), **settings)  # type: ignore[arg-type]
        assert [trajectory.finish_reason for trajectory in result.trajectories] == ["answered"] * 6
        assert starting == [0, most]


async def test_an_engine_that_is_given_has_its_own_number_of_starts(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        with pytest.raises(ConfigError, match=r"ResourceEngine\(max_concurrent_starts=2\)"):
            Runner(agent_using(FakeSpec()), engine=engine, max_concurrent_starts=2)


async def test_the_numbers_of_a_run_tell_how_long_its_resources_were_held_and_busy(world, tmp_path):
    agent = agent_using(FakeSpec(world=world, name="box"))
    async with ResourceEngine(ledger=tmp_path) as engine:
        results = [await run(agent, ["Go."] * 2, policy=ScriptedPolicy(SCRIPT), engine=engine) for _ in range(2)]
        total = engine.occupancy()["box"]
    for metrics in (result.metrics for result in results):
        alive, held, busy = (metrics[f"resource_seconds/box/{part}"] for part in ("alive", "held", "busy"))
        assert alive >= held >= busy >= 8 * 0.04
    assert total.leases == 4
    assert sum(result.metrics["resource_seconds/box/busy"] for result in results) <= total.busy_seconds


async def test_a_run_that_uses_no_resources_has_no_numbers_of_them(tmp_path):
    async with ResourceEngine(ledger=tmp_path) as engine:
        result = await run(Agent(model="scripted"), ["Go."], policy=ScriptedPolicy(["Done."]), engine=engine)
    assert not [name for name in result.metrics if name.startswith("resource_seconds")]


@pytest.mark.slow
async def test_what_the_next_tasks_declare_is_prepared_while_the_ones_before_them_run(world, tmp_path):
    def box_of(task):
        if task["image"] == "image-3":
            raise KeyError("this task knows no image")
        return [FakeSpec(world=world, image=task["image"], idle_timeout_s=None)]

    @tool(resources=box_of)
    async def work(context: Context) -> str:
        """Do some work."""
        await (await context.acquire(box_of(context.task)[0])).use()
        return "done"

    tasks = [{"prompt": "Go.", "image": f"image-{number}"} for number in range(20)]
    agent = Agent(model="scripted", tools=[work])
    script = ScriptedPolicy(SCRIPT, seconds=0.05)
    prepared = []
    async with (
        ResourceEngine(ledger=tmp_path) as engine,
        Runner(agent, policy=script, engine=engine, max_concurrent_rollouts=1) as runner,
    ):
        async for trajectory in runner.stream(to_tasks(tasks)):
            prepared.append({image for operation, image in world.history if operation == "prepare"})
            assert trajectory.infrastructure_failed == (trajectory.task["image"] == "image-3")
    assert len(prepared[0]) <= 1 + PREFETCH_TASKS
    assert "image-1" in prepared[0]
    assert len(prepared[-1]) == 19
    assert world.count("prepare") == 19

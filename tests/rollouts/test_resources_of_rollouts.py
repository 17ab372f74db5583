"""What rollouts hold: frozen while the model thinks, and counted in the numbers of the run."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool import tool
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.contexts.context import Context
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine import ResourceEngine
from agentfly.rollouts.run import run
from agentfly.testing.fake_resource import FakeSpec, FakeWorld


@pytest.fixture
def world():
    async def behave(operation, instance):
        if operation == "use":
            await asyncio.sleep(0.05)

    return FakeWorld(behave)


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


async def test_a_rollouts_instance_is_frozen_while_the_model_thinks_and_runs_for_its_calls(world, tmp_path):
    agent = agent_using(FakeSpec(world=world, idle="freeze", idle_timeout_s=None))
    async with ResourceEngine(ledger=tmp_path) as engine:
        result = await run(agent, ["Go."], policy=ScriptedPolicy(SCRIPT, seconds=0.3), engine=engine)
    assert [call.observation for turn in result.trajectories[0].turns for call in turn.results] == ["done", "done"]
    done = [operation for operation, _ in world.history if operation in ("use", "freeze", "thaw")]
    assert done[:7] == ["use", "use", "freeze", "thaw", "use", "use", "freeze"]


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

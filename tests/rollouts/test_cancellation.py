"""Cancelled rollouts end as cancelled and in bounded time, whatever tools, rewards and policies do."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.events import EventStream, RolloutFinished
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts import rollout_tasks
from agentfly.rollouts.rollout_tasks import CANCEL_GRACE_S
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec
from tests.support.virtual_time import run_in_virtual_time

TURNS = [HermesFormat().write("use", {}), HermesFormat().write("use", {}), "Done."]


async def swallow() -> str:
    """Wait, and make nothing of being cancelled."""
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        return "what cancellation?"
    return "used"


@tool
async def use() -> str:
    """Use it."""
    return await swallow()


@tool(name="use")
async def use_at_once() -> str:
    """Use it."""
    return "used"


@reward
async def one() -> float:
    return 1.0


@reward
async def slow() -> float:
    await swallow()
    return 1.0


@group_reward
async def slow_together(trajectories: list[object]) -> list[float]:
    await swallow()
    return [1.0] * len(trajectories)


class SlowPolicy(ScriptedPolicy):
    async def generate(self, *args, **kwargs):
        await swallow()
        return await super().generate(*args, **kwargs)


WHO_SWALLOWS = {
    "a tool": (use, one, ScriptedPolicy),
    "a policy": (use_at_once, one, SlowPolicy),
    "a reward": (use_at_once, slow, ScriptedPolicy),
    "a group reward": (use_at_once, slow_together, ScriptedPolicy),
}


@pytest.mark.parametrize("how", ["cancel_group", "cancel", "take"])
@pytest.mark.parametrize("who", WHO_SWALLOWS)
def test_whoever_swallows_a_cancellation_the_rollout_is_cancelled_and_has_no_reward(who, how):
    chosen, score, policy = WHO_SWALLOWS[who]

    async def main():
        agent = Agent(model="scripted", tools=[chosen])
        async with (
            Runner(agent, policy=policy(TURNS), reward=score) as runner,  # type: ignore[arg-type]
            runner.batch([Task("a"), Task("b")], attempts=2, label="r") as batch,
        ):
            await asyncio.sleep(1)
            if how == "cancel_group":
                batch.cancel_group("r-0")
                batch.cancel_group("r-1")
            elif how == "cancel":
                await batch.cancel()
            return await batch.take(0, rest="cancel") if how == "take" else [one async for one in batch]

    trajectories = run_in_virtual_time(main())
    assert [trajectory.finish_reason for trajectory in trajectories] == [FinishReason.CANCELLED] * 4
    assert {trajectory.reward for trajectory in trajectories} == {None}
    if who == "a tool":
        assert {len(trajectory.turns) for trajectory in trajectories} == {1}  # and nothing more was sampled


BOX = FakeSpec(world=FakeBackend(), name="box", capacity=1)


@tool(name="use")
async def use_whatever_comes(context: Context) -> str:
    """Use the box for very long."""
    await context.acquire(BOX)
    if context.task["stubborn"]:
        loop = asyncio.get_running_loop()
        end = loop.time() + 1000
        while loop.time() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(end - loop.time())
    return "at last"


def test_a_cancelled_group_that_takes_no_notice_is_handed_out_in_bounded_time_and_gives_its_place_and_lease_back(
    tmp_path, caplog
):
    async def main():
        ended = []
        events = EventStream()
        agent = Agent(model="scripted", tools=[use_whatever_comes])
        async with (
            ResourceEngine(ledger=tmp_path) as engine,
            Runner(
                agent, policy=ScriptedPolicy(TURNS), engine=engine, events=events, max_concurrent_rollouts=1
            ) as runner,
            runner.batch([Task("a", {"stubborn": True}), Task("b", {"stubborn": False})], label="r") as batch,
        ):
            with events.subscribed(lambda event: ended.append(event) if isinstance(event, RolloutFinished) else None):
                await asyncio.sleep(1)
                batch.cancel_group("r-0")
                found = [(one.rollout_id, one.finish_reason) async for one in batch]
                return found, [(one.rollout_id, one.finish_reason) for one in ended], asyncio.get_running_loop().time()

    found, told, took = run_in_virtual_time(main())
    assert found == told == [("r-0.0", "cancelled"), ("r-1.0", "answered")]
    assert took < 1 + CANCEL_GRACE_S + 1
    assert "1 rollouts ignore their cancellation" in caplog.text


def test_the_end_of_the_event_loop_does_not_wait_for_a_rollout_that_takes_no_notice(monkeypatch):
    monkeypatch.setattr(rollout_tasks, "CANCEL_GRACE_S", 0.05)
    over = False
    noticed = 0

    @tool(name="use")
    async def stubborn() -> str:
        """Go on until this test is over."""
        nonlocal noticed
        while not over:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                noticed += 1
        return "over"

    async def main():
        agent = Agent(model="scripted", tools=[stubborn])
        async with Runner(agent, policy=ScriptedPolicy(TURNS)) as runner, runner.batch([Task("a")]) as batch:
            await asyncio.sleep(0.01)
            return await batch.take(0, rest="cancel")

    [trajectory] = asyncio.run(main())
    over = True
    assert trajectory.finish_reason is FinishReason.CANCELLED
    assert noticed == 1


def test_a_rollout_that_had_ended_before_the_cancellation_keeps_what_it_earned():
    @tool(name="use")
    async def take_time(context: Context) -> str:
        """Use it."""
        await asyncio.sleep(context.task["seconds"])
        return "used"

    async def main():
        agent = Agent(model="scripted", tools=[take_time])
        async with (
            Runner(agent, policy=ScriptedPolicy(TURNS), reward=one) as runner,
            runner.batch([Task("a", {"seconds": 1}), Task("b", {"seconds": 100})], label="r") as batch,
        ):
            await asyncio.sleep(10)
            return await batch.take(0, rest="cancel")

    found = [(one.rollout_id, one.finish_reason, one.reward) for one in run_in_virtual_time(main())]
    assert found == [("r-0.0", "answered", 1.0), ("r-1.0", "cancelled", None)]

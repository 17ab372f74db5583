"""Tools in whole rollouts: instances of classes, limits in the policy's tokens, images."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentfly as af
from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.rollouts.runner import Runner

PNG = af.Image(b"\x89PNG...", "image/png")


async def play(tools: list[Any], calls: list[tuple[str, dict[str, Any]]], **settings: Any) -> list[Trajectory]:
    limits = {name: settings.pop(name) for name in ("max_wall_seconds",) if name in settings}
    agent = af.Agent(model="tiny", tools=tools, **limits)
    script = [*(agent.format.write(name, given) for name, given in calls), "Done."]
    return (
        await af.run(agent, ["Go."], policy=af.ScriptedPolicy(script, sees=True, limited=True), **settings)
    ).trajectories


async def test_an_observation_is_cut_by_the_tokens_of_the_policy() -> None:
    @af.tool(max_output_tokens=10)
    def dump() -> list[Any]:
        """Dump."""
        return ["x" * 1000, PNG]

    (trajectory,) = await play([dump], [("dump", {})])
    (record,) = trajectory.turns[0].tool_results
    assert record.observation == "xxxxx\n[... 990 characters left out ...]\nxxxxx"  # a token is a byte there
    assert record.images == (PNG,)


def box() -> tuple[type, list[str]]:
    """A class of tools, and what happened to its instances."""
    history: list[str] = []

    @af.tool
    class Box:
        def __init__(self, context: af.Context) -> None:
            self.rollout_id = context.rollout_id
            self.filled = 0
            context.state["box"] = self
            history.append("made")

        def fill(self) -> int:
            """Fill it."""
            self.filled += 1
            return self.filled

        async def hang(self) -> None:
            """Hang."""
            await asyncio.sleep(3600)

        def close(self) -> None:
            history.append("closed")

    return Box, history


async def test_an_instance_lives_until_the_reward_has_seen_what_is_left_and_is_closed_then() -> None:
    tools, history = box()

    @af.reward
    def filled(context: af.Context) -> float:
        history.append("scored")
        return float(context.state["box"].filled)

    calls: list[tuple[str, dict[str, Any]]] = [("box_fill", {}), ("box_fill", {})]
    trajectories = await play([tools], calls, reward=filled)
    assert [trajectory.reward for trajectory in trajectories] == [2.0]
    assert history == ["made", "scored", "closed"]


@pytest.mark.slow
async def test_an_instance_is_closed_when_its_rollout_runs_out_of_time() -> None:
    tools, history = box()
    (trajectory,) = await play([tools], [("box_fill", {}), ("box_hang", {})], max_wall_seconds=1.0)
    assert trajectory.finish_reason is FinishReason.WALL_TIME
    assert history == ["made", "closed"]


async def test_an_instance_is_closed_when_the_run_is_cancelled() -> None:
    tools, history = box()
    running = asyncio.create_task(play([tools], [("box_fill", {}), ("box_hang", {})], attempts=3))
    async with asyncio.timeout(30):
        while len(history) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait({running})
    assert sorted(history) == ["closed"] * 3 + ["made"] * 3


async def test_a_rollout_that_never_uses_a_class_makes_no_instance() -> None:
    tools, history = box()
    await play([tools], [])
    assert history == []


@pytest.mark.parametrize("calls", [1, 2])
async def test_what_spoils_a_rollout_is_recorded_with_its_cause_however_many_calls_the_turn_has(
    calls: int,
) -> None:
    @af.tool
    def look() -> None:
        """Look."""
        raise ConnectionRefusedError("nobody there")

    agent = af.Agent(model="tiny", tools=[look])
    policy = af.ScriptedPolicy(["\n".join([agent.format.write("look", {})] * calls), "Done."])
    async with policy, Runner(agent, policy=policy) as runner:
        trajectory = await anext(runner.batch([af.Task("Go.")]))
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "ToolUnavailable"
    assert "direct cause of" in trajectory.failure.traceback

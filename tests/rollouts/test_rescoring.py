"""Rescoring of stored trajectories, with the data that their rollouts left."""

import asyncio

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import Boundary, UsageError
from agentfly.core.trajectory import Failure, FinishReason, Trajectory, load_trajectories, save_trajectories
from agentfly.evaluation.rescoring import ScoreChange, rescore
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.run import run
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


@tool
def move() -> ToolResult:
    """Move."""
    return ToolResult("moved", reward=0.25)


@reward(per_turn=True)
def old(turn) -> dict:
    return {"reward": 1, "old_metric": 2}


@reward
def new(response: str, bonus: float) -> dict:
    return {"reward": len(response) + bonus, "new_metric": 1}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
async def stored(tmp_path):
    """Two attempts at each of two tasks, scored, saved and loaded."""
    agent = Agent(model="scripted", tools=[move])
    tasks = [{"prompt": "a", "bonus": 0.5}, {"prompt": "b", "bonus": 10}]
    script = [HermesFormat().write("move", {}), "four"]
    result = await run(agent, tasks, reward=old, attempts=2, policy=ScriptedPolicy(script))
    save_trajectories(result.trajectories, tmp_path / "stored.jsonl")
    return list(load_trajectories(tmp_path / "stored.jsonl"))


async def test_scores_metrics_and_turn_rewards_come_from_the_new_reward(stored):
    before = [one.to_json() for one in stored]
    again = await rescore(stored, new)
    assert [one.to_json() for one in stored] == before, "what is given stays as it is"
    assert [one.reward for one in again] == [4.5, 4.5, 14.0, 14.0]
    assert [one.metrics for one in again] == [{"new_metric": 1.0}] * 4
    assert [[turn.reward for turn in one.turns] for one in again] == [[0.25, None]] * 4
    assert [one.sequences for one in again] == [one.sequences for one in stored]
    change = ScoreChange.between(stored, again)
    assert (change.trajectories, change.changed, change.old_mean, change.new_mean) == (4, 4, 2.0, 9.25)
    assert (change.old_scored, change.new_scored, change.unscored) == (4, 4, {})


async def test_attempts_at_a_task_are_ranked_together(stored):
    groups = []

    @group_reward(after=new)
    def ranked(trajectories: list[Trajectory]) -> list:
        groups.append([one.rollout_id for one in trajectories])
        return [one.reward + one.attempt for one in trajectories]

    again = await rescore(reversed(stored), ranked)
    assert [one.reward for one in again] == [15.0, 14.0, 5.5, 4.5]
    assert sorted(groups) == sorted([[one.rollout_id for one in stored[first : first + 2]] for first in (0, 2)])
    assert again[0].metrics == {"new_metric": 1.0, "new": 14.0}


async def test_trajectories_that_cannot_be_scored_are_counted_by_cause(stored):
    world = FakeBackend()
    box = FakeSpec(world=world, name="box")
    stored[0].failure, stored[0].finish_reason = Failure.of(OSError("disk"), Boundary.MACHINE), FinishReason.FAILED
    stored[0].reward = None
    stored[1].turns.clear()

    @reward
    async def looking(context: Context, bonus: float) -> float:
        if bonus > 1:
            await context.acquire(box)
        return 1.0

    again = await rescore(stored, looking)
    assert [one.reward for one in again] == [None] * 4
    assert "has given it back" in again[3].reward_failure.message
    assert world.history == [], "no empty box is taken for the one that the agent left"
    assert ScoreChange.between(stored, again).unscored == {
        "machine/OSError": 1,
        "no turn": 1,
        "resource/LeaseExpired": 2,
    }


async def test_a_score_that_failed_is_tried_again(stored):
    stored[0].reward, stored[0].reward_failure = None, Failure.of(OSError("judge unreachable"), Boundary.REWARD)
    again = await rescore(stored[:1], new)
    assert (again[0].reward, again[0].reward_failure) == (4.5, None)
    assert ScoreChange.between(stored[:1], again).changed == 1


async def test_trajectories_are_scored_concurrently_with_shared_resources(stored):
    spec = FakeSpec(name="judge")
    at_once, most = 0, 0

    @reward
    async def judged(context: Context) -> float:
        nonlocal at_once, most
        await context.acquire(spec, scope="global")
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        return 1.0

    async with ResourceEngine() as engine:
        again = await rescore(stored, judged, engine=engine, max_concurrent_scores=3)
    assert [one.reward for one in again] == [1.0] * 4
    assert most == 3


async def test_an_object_that_is_not_a_reward_is_refused(stored):
    with pytest.raises(UsageError, match="The function len is not a reward"):
        await rescore(stored, len)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a str, is not a reward"):
        await run(Agent(model="scripted"), ["go"], reward="judged", policy=ScriptedPolicy(["hi"]))  # type: ignore[arg-type]

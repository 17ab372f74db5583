"""Group rewards in runs: attempts run separately, and are scored together once the last has ended."""

import asyncio

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.contexts.context import Context
from agentfly.core.errors import ResourceStartError
from agentfly.core.events import EventStream, RolloutFinished
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.rollouts.run import run
from agentfly.rollouts.runner import Runner
from agentfly.testing.fake_resource import FakeBackend, FakeSpec

AGENT = Agent(model="scripted")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))


def attempt_of(rollout_id):
    return int(rollout_id.rpartition(".")[2])


async def test_each_group_is_scored_once_with_all_its_attempts_in_order():
    groups = []

    @group_reward
    async def ranked(trajectories, prompt: str) -> list[float]:
        groups.append((prompt, [one.attempt for one in trajectories]))
        return [float(one.attempt) for one in trajectories]

    later_first = lambda rollout_id, turn: 0.02 * (4 - attempt_of(rollout_id))  # noqa: E731
    policy = ScriptedPolicy(["hello"], seconds=later_first)
    result = await run(AGENT, ["a", "b"], reward=ranked, attempts=4, policy=policy)
    assert result.rewards == [0.0, 1.0, 2.0, 3.0] * 2
    assert sorted(groups) == [("a", [0, 1, 2, 3]), ("b", [0, 1, 2, 3])]
    assert result.metrics["reward/mean"] == 1.5


async def test_an_attempt_that_waits_for_its_group_holds_no_place_that_the_others_need():
    @group_reward
    def even(trajectories) -> list[float]:
        return [1.0] * len(trajectories)

    async with asyncio.timeout(20):
        result = await run(
            AGENT, ["a"], reward=even, attempts=5, policy=ScriptedPolicy(["hi"]), max_concurrent_rollouts=1
        )
    assert result.rewards == [1.0] * 5


async def test_an_attempt_that_infrastructure_spoils_shifts_no_score_to_its_siblings():
    class Faulty(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            if attempt_of(rollout_id) == 1:
                raise ResourceStartError("no disk space")
            return await super().generate(prompt_ids, sampling, rollout_id=rollout_id, images=images)

    @group_reward
    def by_attempt(trajectories) -> list[float]:
        return [float(one.attempt) for one in trajectories]

    result = await run(AGENT, ["a"], reward=by_attempt, attempts=4, policy=Faulty(["hello"]))
    assert result.rewards == [0.0, None, 2.0, 3.0]
    assert result.trajectories[1].finish_reason is FinishReason.FAILED


async def test_what_comes_first_sees_what_the_agent_left_and_the_group_sees_its_scores():
    world = FakeBackend()
    box = FakeSpec(world=world, capacity=4)

    @reward(resources=[box])
    async def graded(trajectory, context: Context) -> dict:
        await context.acquire(box)
        if trajectory.attempt == 2:
            raise OSError("grader broke")
        return {"reward": 10 * trajectory.attempt, "looked": 1}

    @group_reward(after=graded)
    def best(trajectories) -> list:
        most = max(one.reward for one in trajectories)
        return [one.reward == most if one.attempt else None for one in trajectories]

    async with ResourceEngine() as engine:
        result = await run(AGENT, ["a"], reward=best, attempts=4, policy=ScriptedPolicy(["hi"]), engine=engine)
    assert result.rewards == [None, 0.0, None, 1.0]
    assert [one.metrics for one in result.trajectories] == [
        {"looked": 1.0, "graded": 0.0},
        {"looked": 1.0, "graded": 10.0},
        {},
        {"looked": 1.0, "graded": 30.0},
    ]
    assert "grader broke" in result.trajectories[2].reward_failure.message


async def test_a_group_that_is_cut_off_is_unscored_though_its_attempts_were_looked_at():
    first = reward(name="first")(lambda: 7.0)

    @group_reward(after=first)
    def never(trajectories) -> list[float]:
        raise AssertionError("asked")

    one_ended, events = asyncio.Event(), EventStream()
    policy = ScriptedPolicy(["hi"], seconds=lambda rollout_id, turn: 30.0 * attempt_of(rollout_id))
    with events.subscribed(lambda event: one_ended.set() if isinstance(event, RolloutFinished) else None):
        async with (
            Runner(AGENT, reward=never, policy=policy, events=events) as runner,
            runner.batch([Task("a")], attempts=2) as batch,
        ):
            await one_ended.wait()
            await batch.cancel()
            cut = [one async for one in batch]
    assert sorted((one.finish_reason, one.reward) for one in cut) == [
        (FinishReason.ANSWERED, None),
        (FinishReason.CANCELLED, None),
    ]


async def test_a_group_reward_that_always_fails_stops_the_run_and_says_why():
    @group_reward
    def failing(trajectories) -> list[float]:
        raise OSError("judge unreachable")

    with pytest.raises(FailureBudgetExceeded, match="judge unreachable"):
        await run(AGENT, ["a", "b"], reward=failing, attempts=2, policy=ScriptedPolicy(["hi"]))


@pytest.mark.parametrize("how", ["cancel", "take", "cancel_group"])
async def test_groups_that_are_cancelled_while_they_are_scored_are_cancelled_and_no_failures(how):
    stuck = asyncio.Event()

    @group_reward
    async def judged(trajectories, prompt: str) -> list[float]:
        if prompt != "quick":
            await stuck.wait()
        return [1.0] * len(trajectories)

    async with (
        asyncio.timeout(20),
        Runner(AGENT, policy=ScriptedPolicy(["hi"]), reward=judged) as runner,
        runner.batch([Task("quick"), *map(Task, "abc")], attempts=2, label="b") as batch,
    ):
        first = await anext(batch)
        if how == "cancel_group":
            for number in (1, 2, 3):
                batch.cancel_group(f"b-{number}")
        if how == "cancel":
            await batch.cancel()
        rest = await batch.take(0, rest="cancel") if how == "take" else []
        taken = [first, *rest, *[one async for one in batch]]
        assert [(one.rollout_id, one.reward) for one in taken if one.finish_reason is not FinishReason.CANCELLED] == [
            ("b-0.0", 1.0),
            ("b-0.1", 1.0),
        ]
        assert len(taken) == 8
        cut = [one for one in taken if one.finish_reason is FinishReason.CANCELLED]
        assert not any(one.infrastructure_failed or one.reward is not None for one in cut)
        assert (batch.progress.cancelled, batch.progress.unclaimed) == (6, 0)


async def test_a_group_that_was_cancelled_while_it_was_scored_is_only_scored_when_the_run_goes_on(tmp_path):
    scored = asyncio.Event()
    stuck = [True]

    @group_reward
    async def judged(trajectories) -> list[float]:
        scored.set()
        if stuck:
            await asyncio.Event().wait()
        return [2.0] * len(trajectories)

    settings = {"reward": judged, "attempts": 2, "run_dir": tmp_path / "run"}
    running = asyncio.ensure_future(run(AGENT, ["a"], policy=ScriptedPolicy(["hi"]), **settings))
    await asyncio.wait_for(scored.wait(), 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    stuck.clear()
    nothing_to_say = ScriptedPolicy([])
    assert (await run(AGENT, ["a"], policy=nothing_to_say, resume=True, **settings)).rewards == [2.0, 2.0]

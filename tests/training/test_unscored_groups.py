"""Unscored attempts are in no baseline and no loss, and no score moves to another attempt."""

import math

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.metrics import group_metrics, row_metrics
from agentfly.training.rows import rows_from_trajectories


@group_reward
def patchy(prompt: str) -> list:
    return [1, None, 0, math.nan] if prompt == "some" else [None, None, None, None]


async def test_a_baseline_is_made_of_the_scores_there_are():
    policy = ScriptedPolicy(["hello"])
    result = await run(Agent(model="scripted"), ["some", "none"], reward=patchy, attempts=4, policy=policy)
    assert result.rewards == [1.0, None, 0.0, None, None, None, None, None]
    batch = rows_from_trajectories(result.trajectories)
    assert [(row.rollout_id.rpartition(".")[2], row.reward) for row in batch.rows] == [("0", 1.0), ("2", 0.0)]
    assert batch.excluded == {"unscored": 5, "infrastructure": 1}
    advantages = ALGORITHMS["dr_grpo"].estimate(AdvantageInputs(batch.rows), AdvantageConfig())
    assert [set(values) for values in advantages.values] == [{0.5}, {-0.5}]
    metrics = result.metrics | group_metrics(result.trajectories, batch) | row_metrics(batch, 0)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["reward/mean"] == 0.5

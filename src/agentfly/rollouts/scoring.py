"""Scoring: what a finished rollout was worth, and why where nothing can be said."""

from __future__ import annotations

import time

from agentfly.agents.reward import Reward, sum_of_tool_rewards
from agentfly.contexts.context import Context
from agentfly.errors import Boundary
from agentfly.events import EventStream, RewardFinished
from agentfly.trajectory import Failure, Trajectory


async def score_rollout(trajectory: Trajectory, reward: Reward | None, context: Context, events: EventStream) -> None:
    """Score a rollout that has ended, while what it leased is still there for the reward to look at.

    What infrastructure spoiled, and what ended before its first turn, stays unscored. So does what the reward fails
    for; ``trajectory.reward_failure`` then says why. Without a reward the sum of the tools' rewards is the score.
    """
    if trajectory.infrastructure_failed or not trajectory.turns:
        return
    if reward is None:
        trajectory.reward = sum_of_tool_rewards(trajectory)
        return
    started = time.perf_counter()
    try:
        async with context.call() as call_context:
            result = await reward.score(trajectory, call_context)
        trajectory.reward = result.reward
        trajectory.metrics = dict(result.metrics)
    except Exception as failure:
        trajectory.reward_failure = Failure.of(failure, Boundary.REWARD)
    seconds = time.perf_counter() - started
    trajectory.seconds["reward"] = seconds
    failed = trajectory.reward_failure
    events.emit(
        RewardFinished(
            rollout_id=trajectory.rollout_id,
            reward=trajectory.reward,
            seconds=seconds,
            error=failed.message if failed is not None else None,
        )
    )

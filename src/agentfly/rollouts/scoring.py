"""Scoring: what a finished rollout was worth, and why where nothing can be said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from agentfly.agents.group_reward import AnyReward, GroupReward
from agentfly.agents.reward import sum_of_tool_rewards
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.errors import Boundary
from agentfly.events import EventStream, RewardFinished
from agentfly.interruption import must_pass
from agentfly.trajectory import Failure, Trajectory


async def score_rollout(
    trajectory: Trajectory, reward: AnyReward | None, context: Context, events: EventStream
) -> None:
    """Score a rollout that has ended, while what it leased is still there for the reward to look at.

    What infrastructure spoiled, and what ended before its first turn, stays unscored. So does what the reward fails
    for; ``trajectory.reward_failure`` then says why. Without a reward the sum of the tools' rewards is the score. Each
    turn has what its tools said for its reward, unless the reward says more. Where a group reward is the reward, only
    what it wants to be scored ``after`` is computed here, and kept as a metric of that name: the score comes with the
    group (`agentfly.rollouts.group_scoring`).
    """
    if not can_be_scored(trajectory):
        return
    _credit(trajectory, [sum_of_tool_rewards([turn]) for turn in trajectory.turns])
    if reward is None:
        trajectory.reward = sum_of_tool_rewards(trajectory.turns)
        return
    alone = reward.after if isinstance(reward, GroupReward) else reward
    if alone is None:
        return
    started, task = time.perf_counter(), asyncio.current_task()
    try:
        async with context.call(noticed=False) as call_context:
            result = await alone.score(trajectory, call_context)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if must_pass(error, task):
            raise
        refuse_score(trajectory, error)
    else:
        take_score(trajectory, result)
        if alone is not reward and trajectory.reward is not None:
            trajectory.metrics[alone.name] = trajectory.reward
            trajectory.reward = None
    seconds = time.perf_counter() - started
    trajectory.seconds["reward"] = seconds
    if alone is reward or trajectory.reward_failure is not None:
        tell_score(trajectory, seconds, events)


def can_be_scored(trajectory: Trajectory) -> bool:
    """Whether the policy had a part in what became of a rollout, and nothing else spoiled it."""
    return not trajectory.infrastructure_failed and bool(trajectory.turns)


def take_score(trajectory: Trajectory, result: RewardResult) -> None:
    """Give a trajectory its score."""
    trajectory.reward = result.reward
    trajectory.metrics.update(result.metrics)
    if result.turn_rewards is not None:
        _credit(trajectory, result.turn_rewards)


def refuse_score(trajectory: Trajectory, error: BaseException) -> None:
    """Leave a trajectory unscored, and say why."""
    trajectory.reward = None
    trajectory.reward_failure = Failure.of(error, Boundary.REWARD)


def tell_score(trajectory: Trajectory, seconds: float, events: EventStream) -> None:
    """Tell what came of scoring."""
    failure = trajectory.reward_failure
    events.emit(
        RewardFinished(
            rollout_id=trajectory.rollout_id,
            reward=trajectory.reward,
            seconds=seconds,
            error=failure.message if failure is not None else None,
        )
    )


def _credit(trajectory: Trajectory, rewards: Sequence[float | None]) -> None:
    """Say what each turn was worth."""
    trajectory.turns[:] = [
        turn if turn.reward == one else replace(turn, reward=one)
        for turn, one in zip(trajectory.turns, rewards, strict=True)
    ]

"""Scoring of finished rollouts, one by one or as a group of all attempts at a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from agentfly.agents.group_reward import AnyReward, GroupReward
from agentfly.agents.reward import sum_of_tool_rewards
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.core.errors import Boundary
from agentfly.core.events import EventStream, RewardFinished
from agentfly.core.signals import should_propagate
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.resources.engine.engine import ResourceEngine


async def score_rollout(
    trajectory: Trajectory, reward: AnyReward | None, context: Context, events: EventStream
) -> None:
    """Score a rollout that has ended. Its resources are still leased, so the reward can inspect them.

    A rollout stays unscored if infrastructure failed, if it ended before its first turn, or if the reward fails;
    ``trajectory.reward_failure`` then gives the reason. Without a reward, the score is the sum of the tools' rewards.
    Each turn has the rewards of its own tools, unless the reward sets them. For a group reward, only its ``after``
    reward is computed here and stored as a metric of that name; `score_group` computes the score.
    """
    if not can_be_scored(trajectory):
        return
    _set_turn_rewards(trajectory, [sum_of_tool_rewards([turn]) for turn in trajectory.turns])
    if reward is None:
        trajectory.reward = sum_of_tool_rewards(trajectory.turns)
        return
    alone = reward.after if isinstance(reward, GroupReward) else reward
    if alone is None:
        return
    started, task = time.perf_counter(), asyncio.current_task()
    try:
        async with context.call(observed=False) as call_context:
            result = await alone.score(trajectory, call_context)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if should_propagate(error, task):
            raise
        mark_unscored(trajectory, error)
    else:
        set_score(trajectory, result)
        if alone is not reward and trajectory.reward is not None:
            trajectory.metrics[alone.name] = trajectory.reward
            trajectory.reward = None
    seconds = time.perf_counter() - started
    trajectory.seconds["reward"] = seconds
    if alone is reward or trajectory.reward_failure is not None:
        emit_score(trajectory, seconds, events)


def can_be_scored(trajectory: Trajectory) -> bool:
    """Return whether a rollout has a turn and no infrastructure failure."""
    return not trajectory.infrastructure_failed and bool(trajectory.turns)


def set_score(trajectory: Trajectory, result: RewardResult) -> None:
    """Set the reward, metrics and turn rewards of a trajectory."""
    trajectory.reward = result.reward
    trajectory.metrics.update(result.metrics)
    if result.turn_rewards is not None:
        _set_turn_rewards(trajectory, result.turn_rewards)


def mark_unscored(trajectory: Trajectory, error: BaseException) -> None:
    """Leave a trajectory unscored because of ``error``."""
    trajectory.reward = None
    trajectory.reward_failure = Failure.of(error, Boundary.REWARD)


def emit_score(trajectory: Trajectory, seconds: float, events: EventStream) -> None:
    """Emit the event for a finished scoring."""
    failure = trajectory.reward_failure
    events.emit(
        RewardFinished(
            rollout_id=trajectory.rollout_id,
            reward=trajectory.reward,
            seconds=seconds,
            error=failure.message if failure is not None else None,
        )
    )


def _set_turn_rewards(trajectory: Trajectory, rewards: Sequence[float | None]) -> None:
    """Set the reward of each turn."""
    trajectory.turns[:] = [
        turn if turn.reward == one else replace(turn, reward=one)
        for turn, one in zip(trajectory.turns, rewards, strict=True)
    ]


ScoreGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""Scores all attempts at a task together, and stores the scores in their trajectories."""


def group_scorer(
    reward: AnyReward | None, engine: ResourceEngine, events: EventStream, *, priority: int = 0
) -> ScoreGroup | None:
    """Return the function that scores the attempts of a group once all have ended; None without a group reward."""
    if not isinstance(reward, GroupReward):
        return None
    return partial(score_group, reward=reward, engine=engine, events=events, priority=priority)


async def score_group(
    trajectories: Sequence[Trajectory],
    reward: GroupReward,
    engine: ResourceEngine,
    events: EventStream,
    *,
    priority: int = 0,
) -> None:
    """Score the attempts at one task together, if they can be scored and their ``after`` reward has given a score.

    Each trajectory is changed as by `score_rollout`. If the group reward fails, all of them are unscored.
    """
    sound = sorted((one for one in trajectories if _is_eligible(one, reward)), key=lambda one: one.attempt)
    if not sound:
        return
    started, task = time.perf_counter(), asyncio.current_task()
    first = sound[0]
    context = Context(Trajectory(first.group_id, first.group_id, first.task), engine, priority=priority, ended=True)
    try:
        try:
            async with context.call() as call_context:
                outcomes = await reward.score([_seen(one, reward) for one in sound], call_context)
        finally:
            await asyncio.shield(context.close())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if should_propagate(error, task):
            raise
        for one in sound:
            mark_unscored(one, error)
    else:
        for one, outcome in zip(sound, outcomes, strict=True):
            if isinstance(outcome, RewardResult):
                set_score(one, outcome)
            elif outcome is not None:
                mark_unscored(one, outcome)
    seconds = time.perf_counter() - started
    for one in sound:
        one.seconds["reward"] = one.seconds.get("reward", 0.0) + seconds
        emit_score(one, seconds, events)


def _is_eligible(trajectory: Trajectory, reward: GroupReward) -> bool:
    if trajectory.finish_reason is FinishReason.CANCELLED or not can_be_scored(trajectory):
        return False
    return reward.after is None or reward.after.name in trajectory.metrics


def _seen(trajectory: Trajectory, reward: GroupReward) -> Trajectory:
    """Return a trajectory as the group reward sees it: with the score of its ``after`` reward, if there is one."""
    return trajectory if reward.after is None else replace(trajectory, reward=trajectory.metrics[reward.after.name])

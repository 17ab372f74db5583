"""Scoring of groups: all attempts at a task, once they have ended, are scored together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from agentfly.agents.group_reward import AnyReward, GroupReward
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.events import EventStream
from agentfly.interruption import must_pass
from agentfly.resources.engine import ResourceEngine
from agentfly.rollouts.scoring import can_be_scored, refuse_score, take_score, tell_score
from agentfly.trajectory import FinishReason, Trajectory

ScoreGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""Scores all attempts at a task together, by writing into their trajectories."""


def group_scorer(
    reward: AnyReward | None, engine: ResourceEngine, events: EventStream, *, priority: int = 0
) -> ScoreGroup | None:
    """What is to be called with the attempts of each group once all have ended; None if each is scored by itself."""
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
    """Score the attempts at one task together: those that are sound and whose part ``after`` has given a score.

    What becomes of each is as in `agentfly.rollouts.scoring.score_rollout`. A failure of the whole leaves all of them
    unscored.
    """
    sound = sorted((one for one in trajectories if _takes_part(one, reward)), key=lambda one: one.attempt)
    if not sound:
        return
    started, task = time.perf_counter(), asyncio.current_task()
    first = sound[0]
    context = Context(Trajectory(first.group_id, first.group_id, first.task), engine, priority=priority, over=True)
    try:
        try:
            async with context.call() as call_context:
                outcomes = await reward.score([_seen(one, reward) for one in sound], call_context)
        finally:
            await asyncio.shield(context.close())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if must_pass(error, task):
            raise
        for one in sound:
            refuse_score(one, error)
    else:
        for one, outcome in zip(sound, outcomes, strict=True):
            if isinstance(outcome, RewardResult):
                take_score(one, outcome)
            elif outcome is not None:
                refuse_score(one, outcome)
    seconds = time.perf_counter() - started
    for one in sound:
        one.seconds["reward"] = one.seconds.get("reward", 0.0) + seconds
        tell_score(one, seconds, events)


def _takes_part(trajectory: Trajectory, reward: GroupReward) -> bool:
    if trajectory.finish is FinishReason.CANCELLED or not can_be_scored(trajectory):
        return False
    return reward.after is None or reward.after.name in trajectory.metrics


def _seen(trajectory: Trajectory, reward: GroupReward) -> Trajectory:
    """A trajectory as the group reward sees it: with the score of what comes first, if something does."""
    return trajectory if reward.after is None else replace(trajectory, reward=trajectory.metrics[reward.after.name])

"""Rescoring: scores stored trajectories again, by the same reward or another."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from agentfly.agents.group_reward import AnyReward, GroupReward, require_reward
from agentfly.contexts.context import Context
from agentfly.core.events import EventStream
from agentfly.core.numbers import require_whole
from agentfly.core.signals import cancel_on_sigterm
from agentfly.core.trajectory import Trajectory, require_trajectories
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.runner import require_engine, require_events
from agentfly.rollouts.scoring import score_group, score_rollout


async def rescore(
    trajectories: Iterable[Trajectory],
    reward: AnyReward,
    *,
    engine: ResourceEngine | None = None,
    events: EventStream | None = None,
    max_concurrent_scores: int = 64,
) -> list[Trajectory]:
    """Score trajectories again. Return copies; the given trajectories are not changed.

    ``again = await af.rescore(load_trajectories(path), right)``

    The reward sees the stored trajectory, and can acquire shared resources, such as a judge, or new ones for its call.
    The rollout's own resources are gone. A reward that acquires them (scope ``rollout``) leaves the trajectory unscored
    with a `LeaseExpired` error. Infrastructure failures stay unscored. For a group reward, the trajectories of one
    ``group_id`` form a group.

    Args:
        trajectories: finished trajectories.
        reward: a reward made by `reward`, `group_reward` or `weighted`.
        engine: schedules what the reward acquires; created, and closed at the end, if not given.
        events: receives the events.
        max_concurrent_scores: how many trajectories are scored at a time.

    Returns:
        Copies with the new scores, in the given order.

    Raises:
        UsageError: ``reward`` is not a reward, an item is not a trajectory, or another argument is invalid.
    """
    require_reward(reward)
    require_engine(engine)
    require_events(events)
    require_whole("rescore", max_concurrent_scores=max_concurrent_scores)
    events = events or EventStream()
    fresh = [_without_score(trajectory) for trajectory in require_trajectories(trajectories, "rescore")]
    with cancel_on_sigterm():
        async with AsyncExitStack() as owned:
            if engine is None:
                engine = await owned.enter_async_context(ResourceEngine(events=events))
            await _score_all(fresh, reward, engine, events, asyncio.Semaphore(max_concurrent_scores))
    return fresh


async def _score_all(
    trajectories: list[Trajectory],
    reward: AnyReward,
    engine: ResourceEngine,
    events: EventStream,
    slots: asyncio.Semaphore,
) -> None:
    async def score_one(trajectory: Trajectory) -> None:
        async with slots:
            context = Context(trajectory, engine, ended=True)
            try:
                await score_rollout(trajectory, reward, context, events)
            finally:
                await asyncio.shield(context.close())

    async def together(group: list[Trajectory], reward: GroupReward) -> None:
        async with slots:
            await score_group(group, reward, engine, events)

    async with asyncio.TaskGroup() as scores:
        for trajectory in trajectories:
            scores.create_task(score_one(trajectory))
    if isinstance(reward, GroupReward):
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        async with asyncio.TaskGroup() as scores:
            for group in groups.values():
                scores.create_task(together(group, reward))


def _without_score(trajectory: Trajectory) -> Trajectory:
    """Return a copy without its score. Only the parts that scoring changes are copied."""
    return replace(
        trajectory,
        turns=list(trajectory.turns),
        reward=None,
        reward_failure=None,
        metrics={},
        seconds={name: value for name, value in trajectory.seconds.items() if name != "reward"},
    )


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """The differences between old and new scores.

    Attributes:
        trajectories: number of trajectories.
        changed: number of trajectories whose score has changed, including from or to unscored.
        old_mean, new_mean: mean of the old and of the new scores; None if there are none.
        old_scored, new_scored: number of trajectories that had and that have a score.
        unscored: number of trajectories without a new score, by cause.
    """

    trajectories: int
    changed: int
    old_mean: float | None
    new_mean: float | None
    old_scored: int
    new_scored: int
    unscored: Mapping[str, int]

    @classmethod
    def between(cls, old: Sequence[Trajectory], new: Sequence[Trajectory]) -> ScoreChange:
        """Compare trajectories with the same ones scored again, in the same order."""
        before = [one.reward for one in old if one.reward is not None]
        now = [one.reward for one in new if one.reward is not None]
        return cls(
            trajectories=len(new),
            changed=sum(first.reward != second.reward for first, second in zip(old, new, strict=True)),
            old_mean=math.fsum(before) / len(before) if before else None,
            new_mean=math.fsum(now) / len(now) if now else None,
            old_scored=len(before),
            new_scored=len(now),
            unscored=Counter(map(_why_unscored, (one for one in new if one.reward is None))),
        )


def _why_unscored(trajectory: Trajectory) -> str:
    failure = trajectory.failure or trajectory.reward_failure
    if failure is not None:
        return f"{failure.boundary}/{failure.kind}"
    return "the reward gave none" if trajectory.turns else "no turn"

"""Synthetic groups of attempts."""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.core.errors import Boundary
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.training.rollout_queue import RolloutGroup


def attempted(number: int, rewards: Iterable[float | None]) -> RolloutGroup:
    trajectories = []
    for attempt, value in enumerate(rewards):
        trajectory = Trajectory(f"train-{number}.{attempt}", f"train-{number}", Task(f"task {number}"), attempt)
        sequence = TokenSequence()
        sequence.append_prompt([1, 2])
        sequence.append_sampled([3], [-0.5], version=0)
        trajectory.sequences = [sequence]
        trajectory.finish_reason, trajectory.reward = FinishReason.ANSWERED, value
        if value is None:
            trajectory.failure = Failure(Boundary.RESOURCE, "Lost", "the box is gone", by_policy=False)
        trajectories.append(trajectory)
    return RolloutGroup(number, tuple(trajectories))

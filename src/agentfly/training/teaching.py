"""What the attempts at tasks teach: their rows within the limits, their baselines, and whether an advantage is left."""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.training.advantages import Evidence
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.feed import Attempted
from agentfly.training.row_limits import overlong_penalty, within_limits
from agentfly.training.rows import RowBatch, rows_from_trajectories
from agentfly.trajectory import Trajectory


def limited_rows(trajectories: Iterable[Trajectory], config: TrainConfig) -> RowBatch:
    """The rows of trajectories, with rewards less the penalty on length, and cut where they are too long."""
    batch = rows_from_trajectories(trajectories)
    return within_limits(batch, overlong=config.overlong, max_row_tokens=config.max_row_tokens)


def baselines_of(groups: Iterable[Attempted], config: TrainConfig) -> dict[str, float]:
    """The rewards of greedy rollouts that are sound, by the ids of their groups.

    They are less the penalty on length, as the rewards that are compared with them.
    """
    baselines = {}
    for group in groups:
        greedy = group.greedy
        if greedy is None or greedy.reward is None or greedy.infrastructure_failed:
            continue
        sampled = sum(sequence.sampled_count for sequence in greedy.own_sequences)
        penalty = 0.0 if config.overlong is None else overlong_penalty(sampled, config.overlong)
        baselines[group.group_id] = greedy.reward - penalty
    return baselines


def teaches(group: Attempted, config: TrainConfig) -> bool:
    """Whether the algorithm, asked about a group alone, leaves any of its tokens an advantage.

    Only algorithms with ``judges_groups`` can be asked.
    """
    algorithm = config.chosen_algorithm
    rows = limited_rows(group.trajectories, config).rows
    baselines = baselines_of([group], config) if algorithm.needs_greedy else None
    if not rows or (baselines is not None and group.group_id not in baselines):
        return False
    judged = algorithm.estimate(Evidence(rows, baselines=baselines), config.advantage)
    return any(values.any() for values in judged.values)

"""Metrics of a batch as training sees it: groups, rows and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agentfly.training.equality import are_equal
from agentfly.training.rows import Row, RowBatch
from agentfly.trajectory import Trajectory


def group_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """Whether the groups of a step differ in their rewards, those that dynamic sampling dropped included.

    Args:
        trajectories: all trajectories of the step.
        batch: the rows made of them.
    """
    rewards: dict[str, dict[str, float]] = {trajectory.group_id: {} for trajectory in trajectories}
    for row in batch.rows:
        rewards[row.group_id][row.rollout_id] = row.reward
    groups = list(rewards.values())
    count = max(len(groups), 1)
    return {
        "groups": float(len(groups)),
        "groups/singleton_share": sum(len(group) == 1 for group in groups) / count,
        "groups/zero_variance_share": sum(map(_without_variance, groups)) / count,
        "groups/empty_share": sum(not group for group in groups) / count,
    }


def row_metrics(batch: RowBatch, version: int) -> dict[str, float]:
    """The rows that a step learns from, in numbers, all of which are finite.

    Args:
        batch: the rows.
        version: version of the policy's weights before the update.
    """
    staleness = [version - row.oldest_version for row in batch.rows]
    metrics = {
        "rows": float(len(batch.rows)),
        "rows/sampled_tokens": float(sum(len(row.targets) for row in batch.rows)),
        "rows/tokens": float(sum(len(row) for row in batch.rows)),
        "rows/truncated_share": sum(row.truncated for row in batch.rows) / max(len(batch.rows), 1),
        "anchors/singleton_share": _singleton_share(batch.rows),
        "policy/version": float(version),
        "policy/staleness_mean": sum(staleness) / max(len(staleness), 1),
        "policy/staleness_max": float(max(staleness, default=0)),
    }
    return metrics | {f"left_out/{cause}": float(number) for cause, number in sorted(batch.left_out.items())}


def _without_variance(rewards: Mapping[str, float]) -> bool:
    return len(rewards) > 1 and are_equal(min(rewards.values()), max(rewards.values()))


def _singleton_share(rows: Sequence[Row]) -> float:
    """Share of the agent's turns that are alone in their state: no other turn of their group was taken in it."""
    taken = Counter(
        (row.group_id, turn.anchor) for row in rows if not row.agent for turn in row.turns if turn.kind == "act"
    )
    alone = sum(number if not anchor else number == 1 for (_, anchor), number in taken.items())
    return alone / max(taken.total(), 1)

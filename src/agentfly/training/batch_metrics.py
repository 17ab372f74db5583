"""Metrics of a batch as training sees it: groups, rows and what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.training.rows import RowBatch
from agentfly.trajectory import Trajectory


def batch_metrics(trajectories: Sequence[Trajectory], batch: RowBatch, version: int) -> dict[str, float]:
    """Numbers that tell whether a batch could teach anything; every value is finite.

    Args:
        trajectories: all trajectories of the batch.
        batch: the rows made of them.
        version: version of the policy's weights before the update.
    """
    rewards: dict[str, dict[str, float]] = {trajectory.group_id: {} for trajectory in trajectories}
    for row in batch.rows:
        rewards[row.group_id][row.rollout_id] = row.reward
    groups = list(rewards.values())
    count = max(len(groups), 1)
    staleness = [version - row.oldest_version for row in batch.rows]
    metrics = {
        "groups": float(len(groups)),
        "groups/singleton_share": sum(len(group) == 1 for group in groups) / count,
        "groups/zero_variance_share": sum(len(group) > 1 and len(set(group.values())) == 1 for group in groups) / count,
        "groups/empty_share": sum(not group for group in groups) / count,
        "rows": float(len(batch.rows)),
        "rows/sampled_tokens": float(sum(len(row.targets) for row in batch.rows)),
        "rows/tokens": float(sum(len(row) for row in batch.rows)),
        "rows/truncated_share": sum(row.truncated for row in batch.rows) / max(len(batch.rows), 1),
        "policy/version": float(version),
        "policy/staleness_max": float(max(staleness, default=0)),
    }
    return metrics | {f"left_out/{cause}": float(number) for cause, number in sorted(batch.left_out.items())}

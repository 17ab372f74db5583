"""Training metrics of groups, rows, excluded trajectories and rollout durations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agentfly.core.events import Event, RolloutFinished, RolloutStarted
from agentfly.core.trajectory import Trajectory
from agentfly.training.advantages.numerics import nearly_equal
from agentfly.training.rows import Row, RowBatch


def group_metrics(trajectories: Sequence[Trajectory], batch: RowBatch) -> dict[str, float]:
    """Return metrics of the reward variance within the groups of a step, including dropped groups.

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
        "groups/singleton_fraction": sum(len(group) == 1 for group in groups) / count,
        "groups/zero_variance_fraction": sum(map(_has_zero_variance, groups)) / count,
        "groups/empty_fraction": sum(not group for group in groups) / count,
    }


def row_metrics(batch: RowBatch, version: int) -> dict[str, float]:
    """Return metrics of the rows that a step learns from. All are finite.

    Args:
        batch: the rows.
        version: version of the policy's weights before the update.
    """
    staleness = [version - row.oldest_version for row in batch.rows]
    metrics = {
        "rows": float(len(batch.rows)),
        "rows/sampled_tokens": float(sum(len(row.targets) for row in batch.rows)),
        "rows/tokens": float(sum(len(row) for row in batch.rows)),
        "rows/truncated_fraction": sum(row.truncated for row in batch.rows) / max(len(batch.rows), 1),
        "anchors/singleton_fraction": _singleton_fraction(batch.rows),
        "policy/version": float(version),
        "policy/staleness_mean": sum(staleness) / max(len(staleness), 1),
        "policy/staleness_max": float(max(staleness, default=0)),
    }
    return metrics | {f"excluded/{cause}": float(number) for cause, number in sorted(batch.excluded.items())}


def _has_zero_variance(rewards: Mapping[str, float]) -> bool:
    return len(rewards) > 1 and nearly_equal(min(rewards.values()), max(rewards.values()))


def _singleton_fraction(rows: Sequence[Row]) -> float:
    """Return the fraction of the agent's turns with a state that no other turn of their group has."""
    taken = Counter(
        (row.group_id, turn.anchor) for row in rows if not row.agent for turn in row.turns if turn.kind == "act"
    )
    alone = sum(number if not anchor else number == 1 for (_, anchor), number in taken.items())
    return alone / max(taken.total(), 1)


DISPATCHED, TRAINED = "rollout_seconds/dispatched", "rollout_seconds/trained"
"""Names of two distributions: all rollouts that finished since the previous step, and the trained ones. They differ if
slow rollouts are trained less often than others."""


def durations(trajectories: Iterable[Trajectory]) -> list[float]:
    """Return the wall times of rollouts, in seconds."""
    return [trajectory.seconds.get("total", 0.0) for trajectory in trajectories]


def duration_metrics(distributions: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return statistics of named distributions of durations. An empty distribution has only its count."""
    metrics = {}
    for name, seconds in distributions.items():
        metrics[f"{name}/count"] = float(len(seconds))
        if ordered := sorted(seconds):
            metrics[f"{name}/mean"] = sum(ordered) / len(ordered)
            metrics[f"{name}/p50"] = _quantile(ordered, 0.5)
            metrics[f"{name}/p95"] = _quantile(ordered, 0.95)
            metrics[f"{name}/max"] = ordered[-1]
    return metrics


def _quantile(ordered: list[float], share: float) -> float:
    """Return a quantile by linear interpolation."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class RolloutBusyTimer:
    """Measures for how long at least one rollout with a label was running; an event subscriber.

    Args:
        label: prefix of the group ids.
    """

    def __init__(self, label: str) -> None:
        self._beginning = f"{label}-"
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, (RolloutStarted, RolloutFinished)) and event.group_id.startswith(self._beginning):
            if isinstance(event, RolloutStarted):
                if not self._running:
                    self._since = time.perf_counter()
                self._running += 1
            else:
                self._running -= 1
                if not self._running:
                    self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """The seconds during which at least one rollout was running."""
        return self._seconds + (time.perf_counter() - self._since if self._running else 0.0)

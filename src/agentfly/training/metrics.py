"""Training metrics of groups, rows, excluded trajectories, rollout durations and updates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentfly.core.events import Event, RolloutFinished, RolloutStarted
from agentfly.core.trajectory import Trajectory
from agentfly.training.advantages.algorithm import nearly_equal
from agentfly.training.losses.aggregation import ClipRange, TokenBatch, TokenLoss
from agentfly.training.losses.kl import k3_estimate
from agentfly.training.rows import Row, RowBatch

if TYPE_CHECKING:
    from torch import Tensor


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
    singletons = sum(number if not anchor else number == 1 for (_, anchor), number in taken.items())
    return singletons / max(taken.total(), 1)


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


# --- the update -------------------------------------------------------------------------------------------------------


class MetricAccumulator:
    """Accumulates metrics over micro-batches. Values that are not finite are ignored, so every metric is finite."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def add_mean(self, name: str, values: Tensor) -> None:
        """Add values to a mean."""
        numbers = _finite(values)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(numbers.sum()), count + len(numbers))

    def add_max(self, name: str, values: Tensor) -> None:
        """Add nonnegative values to a maximum."""
        numbers = _finite(values)
        self._maxima[name] = max(self._maxima.get(name, 0.0), float(numbers.max()) if len(numbers) else 0.0)

    def metrics(self) -> dict[str, float]:
        """Return every mean and maximum by name; 0 if there was no finite value."""
        return {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()} | self._maxima


def _finite(values: Tensor) -> Tensor:
    numbers = values.detach().double().flatten()
    return numbers[numbers.isfinite()]


def accumulate_policy_metrics(
    tally: MetricAccumulator, batch: TokenBatch, policy: TokenLoss, entropy: Tensor, clip: ClipRange
) -> None:
    """Add the counted tokens of a micro-batch to the metrics of an update.

    Args:
        tally: accumulates the metrics.
        batch: the tokens.
        policy: their policy loss.
        entropy: entropy of the distribution that each token was sampled from, in nats; [N].
        clip: the bounds of the loss.
    """
    mask = batch.mask
    ratio, clipped = policy.ratio[mask], policy.clipped[mask]
    tally.add_mean("policy/entropy", entropy[mask])
    tally.add_mean("policy/loss", policy.loss[mask])
    tally.add_mean("policy/clip_fraction", clipped)
    tally.add_mean("policy/clip_fraction_low", clipped & (ratio < 1.0 - clip.low))
    tally.add_mean("policy/clip_fraction_high", clipped & (ratio > 1.0 + clip.high))
    tally.add_mean("policy/ratio_mean", ratio)
    tally.add_max("policy/ratio_max", ratio)
    tally.add_mean("policy/kl", k3_estimate(batch.old, batch.logprobs, mask)[mask])

"""Durations: how long rollouts take, and how much of that goes by while the weights are updated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from agentfly.events import Event, RolloutFinished, RolloutStarted
from agentfly.trajectory import Trajectory

DISPATCHED, TRAINED = "rollout_seconds/dispatched", "rollout_seconds/trained"
"""Names of the two distributions: of the rollouts that have ended since the step before, whatever becomes of them, and
of those that a step was trained on. Were slow rollouts trained less often than others, they would differ."""


def durations(trajectories: Iterable[Trajectory]) -> list[float]:
    """Wall times of rollouts, in seconds."""
    return [trajectory.seconds.get("total", 0.0) for trajectory in trajectories]


def duration_metrics(distributions: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Distributions of durations, by name, as metrics; of an empty one there is but the count."""
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
    """The value below which that share lies, between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Overlap:
    """Tells for how long rollouts of some label were under way; a subscriber of events.

    Args:
        label: what the ids of their groups begin with.
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
        """The seconds in which at least one was under way."""
        return self._seconds + (time.perf_counter() - self._since if self._running else 0.0)

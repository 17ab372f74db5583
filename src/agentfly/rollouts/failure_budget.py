"""Failure budget: stops a run when infrastructure failures spoil too many rollouts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from agentfly.core.errors import AgentFlyError, ConfigError
from agentfly.core.trajectory import Failure, Trajectory

SMALLEST_WINDOW = 64
"""Minimum number of recent rollouts whose failure rate is checked."""


class FailureBudgetExceeded(AgentFlyError):
    """Too many rollouts failed for reasons that the policy could not cause."""


class FailureBudget:
    """Counts infrastructure failures of a batch, and stops it when there are too many.

    There are too many when the failure rate of the whole batch, or of the last rollouts, exceeds the allowed rate. The
    number of last rollouts (the window) depends on the concurrency, because failures are often quick and come first.
    If a share ``s`` of the rollouts fails at once, ``s / (1 - s)`` rollouts fail for each one that continues. With
    ``n`` concurrent rollouts, a run with exactly this rate therefore needs a window of at least ``n / (1 - s)``.

    Args:
        max_failure_rate: the allowed share of failures, from 0 to 1.
        at_a_time: returns the largest number of rollouts that ran at the same time.

    Raises:
        ConfigError: ``max_failure_rate`` is out of its range.
    """

    def __init__(self, max_failure_rate: float, at_a_time: Callable[[], int]) -> None:
        if not 0 <= max_failure_rate <= 1:
            raise ConfigError(f"max_failure_rate={max_failure_rate!r}: it must be between 0 and 1.")
        self._share = max_failure_rate
        self._window: deque[bool] = deque()  # whether each of the last rollouts failed
        self._spoiled_lately = 0
        self._at_a_time = at_a_time
        self._ended = 0
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}

    def record(self, trajectory: Trajectory, *, rollouts: int | None) -> FailureBudgetExceeded | None:
        """Count a rollout that has ended. Return the error with which the run must stop, if any.

        Args:
            trajectory: the rollout's trajectory.
            rollouts: number of rollouts in the batch, those that have not begun included; None if not known.
        """
        self._ended += 1
        spoiled = trajectory.infrastructure_failed
        self._window.append(spoiled)
        self._spoiled_lately += spoiled
        size = self._window_size
        while len(self._window) > size:
            self._spoiled_lately -= self._window.popleft()
        if not spoiled:
            return None
        failure = next(f for f in (trajectory.failure, trajectory.reward_failure) if f and not f.by_policy)
        self._kinds[failure.kind] += 1
        self._examples.setdefault(failure.kind, failure)
        if rollouts is not None and self._kinds.total() > self._share * rollouts:
            return self._error(f"{self._kinds.total()} of {self._ended} rollouts")
        if self._spoiled_lately > self._share * size:
            return self._error(f"{self._spoiled_lately} of the last {len(self._window)} rollouts")
        return None

    @property
    def _window_size(self) -> int:
        sound_share = 1 - self._share
        return max(SMALLEST_WINDOW, math.ceil(self._at_a_time() / sound_share) if sound_share else 0)

    def error_if_all_failed(self) -> FailureBudgetExceeded | None:
        """Return an error if every rollout that has ended failed for reasons of infrastructure."""
        if self._ended and self._kinds.total() == self._ended:
            return self._error(f"{self._ended} of {self._ended} rollouts")
        return None

    def _error(self, lost: str) -> FailureBudgetExceeded:
        kind, count = self._kinds.most_common(1)[0]
        example = self._examples[kind]
        place = f" (raised at {example.location})" if example.location else ""
        return FailureBudgetExceeded(
            f"{lost} failed for reasons that the policy could not cause; stopping. The most frequent was {kind} "
            f"({count} times), for instance: {example.message}{place}"
        )

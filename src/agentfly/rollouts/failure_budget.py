"""Failure budget: stops a run when infrastructure failures spoil too many rollouts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from agentfly.core.errors import AgentFlyError, ConfigError
from agentfly.core.trajectory import Failure, Trajectory

SMALLEST_WINDOW = 64
"""Rollouts that are looked back on at least."""


class FailureBudgetExceeded(AgentFlyError):
    """So many rollouts failed for reasons the policy could not cause that going on would be a waste."""


class FailureBudget:
    """Counts what infrastructure spoiled of a batch, and says when that is too much.

    It is too much when more than the allowed share of the whole batch is lost, or of the rollouts that ended last. How
    many those are follows from how many run at a time: failures are often quicker than what is sound, and come first.
    If of every rollout that begins a share ``s`` fails at once, ``s / (1 - s)`` fail for each that runs on, so with
    ``n`` at a time a window of ``n / (1 - s)`` is the least in which a run with just that share goes on.

    Args:
        max_failure_rate: the share that may be lost.
        at_a_time: how many rollouts have run at a time.

    Raises:
        ConfigError: the share is none.
    """

    def __init__(self, max_failure_rate: float, at_a_time: Callable[[], int]) -> None:
        if not 0 <= max_failure_rate <= 1:
            raise ConfigError(f"max_failure_rate={max_failure_rate!r}: a share lies between 0 and 1.")
        self._share = max_failure_rate
        self._window: deque[bool] = deque()  # whether each of those that ended last was spoiled
        self._spoiled_lately = 0
        self._at_a_time = at_a_time
        self._ended = 0
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}

    def record(self, trajectory: Trajectory, *, rollouts: int | None) -> FailureBudgetExceeded | None:
        """Take note of a rollout that has ended. Answers why the run is to stop, if it is.

        Args:
            trajectory: what came of it.
            rollouts: how many rollouts the batch has, those that have not begun included; None if that is not known.
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
        """Why there is no result to return once every rollout has ended: not one of them was sound."""
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

"""Comparison: two evaluations of the same tasks, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentfly.errors import ConfigError
from agentfly.json_values import Brief
from agentfly.rollouts.estimates import Estimate, difference_of_shares, mean_over_tasks
from agentfly.rollouts.scoreboard import Scoreboard, TaskScores
from agentfly.trajectory import Trajectory

_EQUAL = 1e-9
"""Means of a task that differ by no more are a tie: their difference is rounding."""


@dataclass(frozen=True, slots=True, repr=False)
class Pair(Brief):
    """One task's scores in both evaluations."""

    task_id: str
    first: TaskScores
    second: TaskScores


@dataclass(frozen=True, slots=True)
class Difference:
    """How much a number of the second evaluation is above the first's, over the same tasks.

    Attributes:
        first, second: the means over the tasks.
        difference: second less first, paired by task. The interval is that of a difference of shares where all numbers
            lie within 0 and 1, else Student's t over the tasks' differences.
        wins, ties, losses: number of tasks in which the second's mean is above, as high as, and below the first's.
    """

    first: float
    second: float
    difference: Estimate
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, repr=False)
class Comparison(Brief):
    """Two evaluations side by side, over the tasks that have scores in both. What is left out is counted.

    Pairing takes out how hard each task is, which both have in common, so the interval of the difference is narrower
    than two intervals beside one another tell.

    Attributes:
        pairs: the tasks that are compared, in the order of the first evaluation.
        reward: the difference of rewards.
        success: the difference of the share of attempts that solve their task.
        only_first, only_second: number of tasks that only one of the evaluations holds.
        without_scores: number of tasks that both hold and that one of them has no score of.
    """

    pairs: tuple[Pair, ...]
    reward: Difference
    success: Difference
    only_first: int
    only_second: int
    without_scores: int

    @classmethod
    def of(cls, first: Iterable[Trajectory], second: Iterable[Trajectory]) -> Comparison:
        """Compare two evaluations.

        Raises:
            ConfigError: a task of one id is another in the two, no task is in both, or none has scores in both.
        """
        one, other = Scoreboard.of(first), Scoreboard.of(second)
        shared = [name for name in one.tasks if name in other.tasks]
        changed = [name for name in shared if one.tasks[name].task.content != other.tasks[name].task.content]
        if changed:
            raise ConfigError(
                f"The evaluations cannot be compared: {len(changed)} of {len(shared)} tasks of the same id are not the "
                f"same in both, for instance {changed[0]!r}. Evaluate both on the same tasks."
            )
        if not shared:
            raise ConfigError(
                f"The evaluations cannot be compared: none of the {len(one.tasks)} tasks of the first is among the "
                f"{len(other.tasks)} of the second. Evaluate both on the same tasks."
            )
        pairs = [Pair(name, one.tasks[name], other.tasks[name]) for name in shared]
        scored = tuple(pair for pair in pairs if pair.first.rewards and pair.second.rewards)
        if not scored:
            raise ConfigError(
                f"The evaluations cannot be compared: none of their {len(shared)} tasks has a score in both. Their "
                "trajectories tell why: reward_failure and failure."
            )
        return cls(
            pairs=scored,
            reward=_difference(scored, lambda scores: scores.rewards),
            success=_difference(scored, lambda scores: scores.successes),
            only_first=len(one.tasks) - len(shared),
            only_second=len(other.tasks) - len(shared),
            without_scores=len(pairs) - len(scored),
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "reward": asdict(self.reward),
            "success": asdict(self.success),
            "only_first": self.only_first,
            "only_second": self.only_second,
            "without_scores": self.without_scores,
            "tasks": [
                {"id": pair.task_id, "first": pair.first.rewards, "second": pair.second.rewards} for pair in self.pairs
            ],
        }


def _difference(pairs: Sequence[Pair], scores: Callable[[TaskScores], Sequence[float]]) -> Difference:
    firsts = [_mean(scores(pair.first)) for pair in pairs]
    seconds = [_mean(scores(pair.second)) for pair in pairs]
    differences = [second - first for first, second in zip(firsts, seconds, strict=True)]
    given = [[scores(pair.first) for pair in pairs], [scores(pair.second) for pair in pairs]]
    bounded = all(0.0 <= one <= 1.0 for side in given for task in side for one in task)
    wins, losses = (sum(sign * one > _EQUAL for one in differences) for sign in (1, -1))
    return Difference(
        first=_mean(firsts),
        second=_mean(seconds),
        difference=difference_of_shares(*given) if bounded else mean_over_tasks([[one] for one in differences]),
        wins=wins,
        ties=len(pairs) - wins - losses,
        losses=losses,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""Scores of an evaluation, task by task, and the paired comparison of two evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentfly.core.errors import ConfigError
from agentfly.core.json_values import Brief
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason, Trajectory, require_trajectories
from agentfly.evaluation.statistics import (
    Estimate,
    difference_of_shares,
    mean_over_tasks,
    pass_at_k,
    pass_hat_k,
    proportion_over_tasks,
)
from agentfly.rollouts.metrics import is_success


@dataclass(frozen=True, slots=True, repr=False)
class TaskScores(Brief):
    """The scores of the attempts at one task.

    Attributes:
        task: the task.
        rewards: the reward of each counted attempt, in the order of the attempts.
        successes: whether each of them solved the task (see `agentfly.rollouts.metrics.is_success`).
        excluded: number of attempts that are not counted, by cause: ``infrastructure``, ``cancelled``, ``unscored``.
    """

    task: Task
    rewards: tuple[float, ...]
    successes: tuple[bool, ...]
    excluded: Mapping[str, int]

    def pass_at(self, k: int) -> float | None:
        """Return the chance that one of ``k`` attempts solves the task; None if fewer than ``k`` attempts count."""
        return pass_at_k(len(self.successes), sum(self.successes), k) if k <= len(self.successes) else None

    def pass_hat(self, k: int) -> float | None:
        """Return the chance that all of ``k`` attempts solve the task; None if fewer than ``k`` attempts count."""
        return pass_hat_k(len(self.successes), sum(self.successes), k) if k <= len(self.successes) else None


@dataclass(frozen=True, repr=False)
class EvaluationScores(Brief):
    """The scores of an evaluation. Unscored attempts and infrastructure failures are in no mean.

    Attributes:
        tasks: the scores of each task by its id, in the order of the tasks.
    """

    tasks: Mapping[str, TaskScores]

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> EvaluationScores:
        """Collect the scores of trajectories.

        Raises:
            ConfigError: two tasks of different content have the same id.
            UsageError: an item is not a trajectory.
        """
        attempts: dict[str, list[Trajectory]] = {}
        for trajectory in require_trajectories(trajectories, "EvaluationScores.from_trajectories"):
            known = attempts.setdefault(trajectory.task.id, [])
            if known and known[0].task.canonical_json != trajectory.task.canonical_json:
                raise ConfigError(
                    f"Two tasks have the id {trajectory.task.id!r}, so their scores cannot be separated. Give each "
                    "task a unique id."
                )
            known.append(trajectory)
        return cls({name: _scores(known) for name, known in attempts.items()})

    @property
    def scored(self) -> list[TaskScores]:
        """The tasks with a counted attempt."""
        return [scores for scores in self.tasks.values() if scores.rewards]

    @property
    def excluded(self) -> dict[str, int]:
        """Number of attempts that are not counted, by cause."""
        return dict(sum((Counter(scores.excluded) for scores in self.tasks.values()), Counter[str]()))

    @property
    def max_attempts(self) -> int:
        """The largest number of counted attempts at a task."""
        return max((len(scores.rewards) for scores in self.tasks.values()), default=0)

    def reward(self) -> Estimate | None:
        """Return the mean reward, with an interval clustered by task; None if nothing counts.

        It is an interval of a share if all rewards are between 0 and 1, else Student's t.
        """
        if not self.scored:
            return None
        rewards = [scores.rewards for scores in self.scored]
        bounded = all(0.0 <= one <= 1.0 for task in rewards for one in task)
        return proportion_over_tasks(rewards) if bounded else mean_over_tasks(rewards)

    def success(self) -> Estimate | None:
        """Return the share of attempts that solve their task, with a Wilson interval clustered by task, or None."""
        return proportion_over_tasks([scores.successes for scores in self.scored]) if self.scored else None

    def pass_at(self, k: int) -> Estimate | None:
        """Return pass@k over the tasks with at least ``k`` counted attempts; None without such tasks.

        The interval is for a share, clustered by task.
        """
        return self._of_k(k, TaskScores.pass_at)

    def pass_hat(self, k: int) -> Estimate | None:
        """Return pass^k, the chance that all of ``k`` attempts solve the task; otherwise like `pass_at`."""
        return self._of_k(k, TaskScores.pass_hat)

    def _of_k(self, k: int, chance_of: Callable[[TaskScores, int], float | None]) -> Estimate | None:
        if k == 1:
            return self.success()
        found = [(chance, len(one.rewards)) for one in self.scored if (chance := chance_of(one, k)) is not None]
        if not found:
            return None
        return proportion_over_tasks([[chance] for chance, _ in found], attempts=sum(count for _, count in found))

    def to_json(self, ks: Sequence[int]) -> dict[str, Any]:
        """Return the estimates, the excluded attempts and each task's scores as JSON."""
        return {
            "reward": _json_of(self.reward()),
            "success": _json_of(self.success()),
            "pass_at": {str(k): _json_of(self.pass_at(k)) for k in ks},
            "pass_hat": {str(k): _json_of(self.pass_hat(k)) for k in ks},
            "excluded": self.excluded,
            "tasks": [
                {"id": name, "rewards": scores.rewards, "successes": scores.successes, "excluded": scores.excluded}
                for name, scores in self.tasks.items()
            ],
        }


def default_ks(attempts: int) -> list[int]:
    """Return the values of k that are reported for a number of attempts: 1, 2, 4, … and the number itself."""
    return sorted({1, attempts, *(2**power for power in range(attempts.bit_length()))}) if attempts else []


def _scores(attempts: Sequence[Trajectory]) -> TaskScores:
    counted, excluded = [], Counter[str]()
    for trajectory in sorted(attempts, key=lambda one: one.attempt):
        cause = _exclusion_cause(trajectory)
        if cause is None:
            counted.append(trajectory)
        else:
            excluded[cause] += 1
    return TaskScores(
        task=attempts[0].task,
        rewards=tuple(one.reward for one in counted if one.reward is not None),
        successes=tuple(bool(is_success(one)) for one in counted),
        excluded=dict(excluded),
    )


def _exclusion_cause(trajectory: Trajectory) -> str | None:
    """Return why an attempt is not counted; None if it is."""
    if trajectory.infrastructure_failed:
        return "infrastructure"
    if trajectory.finish_reason is FinishReason.CANCELLED:
        return "cancelled"
    return "unscored" if trajectory.reward is None else None


def _json_of(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "tasks": estimate.tasks}


_EQUAL = 1e-9
"""Means of a task that differ by at most this are a tie: the difference is rounding."""


@dataclass(frozen=True, slots=True, repr=False)
class TaskPair(Brief):
    """One task's scores in both evaluations."""

    task_id: str
    first: TaskScores
    second: TaskScores


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of a number between two evaluations of the same tasks.

    Attributes:
        first, second: the means over the tasks.
        difference: second minus first, paired by task. It is an interval of a difference of shares if all numbers
            are between 0 and 1, else Student's t over the tasks' differences.
        wins, ties, losses: number of tasks whose mean in the second evaluation is above, equal to, and below the first.
    """

    first: float
    second: float
    difference: Estimate
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, repr=False)
class EvaluationComparison(Brief):
    """A comparison of two evaluations over the tasks with scores in both. The number of other tasks is reported.

    Pairing removes the difficulty of each task, which both evaluations share. So the interval of the difference is
    narrower than the two separate intervals suggest.

    Attributes:
        pairs: the compared tasks, in the order of the first evaluation.
        reward: the second evaluation's mean reward minus the first's.
        success: the same difference for the share of attempts that solve their task.
        only_first, only_second: number of tasks that are only in one of the evaluations.
        unscored: number of tasks in both evaluations that have no score in one of them.
    """

    pairs: tuple[TaskPair, ...]
    reward: PairedDifference
    success: PairedDifference
    only_first: int
    only_second: int
    unscored: int

    @classmethod
    def from_trajectories(cls, first: Iterable[Trajectory], second: Iterable[Trajectory]) -> EvaluationComparison:
        """Compare two evaluations.

        Raises:
            ConfigError: a task with the same id differs in the two, no task is in both, or none has scores in both.
        """
        one, other = EvaluationScores.from_trajectories(first), EvaluationScores.from_trajectories(second)
        shared = [name for name in one.tasks if name in other.tasks]
        changed = [
            name for name in shared if one.tasks[name].task.canonical_json != other.tasks[name].task.canonical_json
        ]
        if changed:
            raise ConfigError(
                f"The evaluations cannot be compared: {len(changed)} of {len(shared)} tasks with the same id differ, "
                f"for instance {changed[0]!r}. Evaluate both on the same tasks."
            )
        if not shared:
            raise ConfigError(
                f"The evaluations cannot be compared: none of the {len(one.tasks)} tasks of the first is among the "
                f"{len(other.tasks)} of the second. Evaluate both on the same tasks."
            )
        pairs = [TaskPair(name, one.tasks[name], other.tasks[name]) for name in shared]
        scored = tuple(pair for pair in pairs if pair.first.rewards and pair.second.rewards)
        if not scored:
            raise ConfigError(
                f"The evaluations cannot be compared: none of their {len(shared)} tasks has a score in both. Their "
                "trajectories give the reasons: reward_failure and failure."
            )
        return cls(
            pairs=scored,
            reward=_difference(scored, lambda scores: scores.rewards),
            success=_difference(scored, lambda scores: scores.successes),
            only_first=len(one.tasks) - len(shared),
            only_second=len(other.tasks) - len(shared),
            unscored=len(pairs) - len(scored),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {
            "reward": asdict(self.reward),
            "success": asdict(self.success),
            "only_first": self.only_first,
            "only_second": self.only_second,
            "unscored": self.unscored,
            "tasks": [
                {"id": pair.task_id, "first": pair.first.rewards, "second": pair.second.rewards} for pair in self.pairs
            ],
        }


def _difference(pairs: Sequence[TaskPair], scores: Callable[[TaskScores], Sequence[float]]) -> PairedDifference:
    firsts = [_mean(scores(pair.first)) for pair in pairs]
    seconds = [_mean(scores(pair.second)) for pair in pairs]
    differences = [second - first for first, second in zip(firsts, seconds, strict=True)]
    given = [[scores(pair.first) for pair in pairs], [scores(pair.second) for pair in pairs]]
    bounded = all(0.0 <= one <= 1.0 for side in given for task in side for one in task)
    wins, losses = (sum(sign * one > _EQUAL for one in differences) for sign in (1, -1))
    return PairedDifference(
        first=_mean(firsts),
        second=_mean(seconds),
        difference=difference_of_shares(*given) if bounded else mean_over_tasks([[one] for one in differences]),
        wins=wins,
        ties=len(pairs) - wins - losses,
        losses=losses,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""Scoreboard: what an evaluation's trajectories are worth, task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ConfigError
from agentfly.json_values import Brief
from agentfly.rollouts.estimates import Estimate, mean_over_tasks, pass_at_k, pass_hat_k, share_over_tasks
from agentfly.rollouts.summary import succeeded
from agentfly.task import Task
from agentfly.trajectory import FinishReason, Trajectory, require_trajectories


@dataclass(frozen=True, slots=True, repr=False)
class TaskScores(Brief):
    """What the attempts at one task are worth.

    Attributes:
        task: the task.
        rewards: the reward of each attempt that counts, in the order of the attempts.
        successes: whether each of them solved the task (see `agentfly.rollouts.summary.succeeded`).
        left_out: how many attempts count in nothing, by cause: ``infrastructure``, ``cancelled``, ``unscored``.
    """

    task: Task
    rewards: tuple[float, ...]
    successes: tuple[bool, ...]
    left_out: Mapping[str, int]

    def pass_at(self, k: int) -> float | None:
        """Chance that one of ``k`` attempts solves the task; None where fewer than ``k`` attempts count."""
        return pass_at_k(len(self.successes), sum(self.successes), k) if k <= len(self.successes) else None

    def pass_hat(self, k: int) -> float | None:
        """Chance that all of ``k`` attempts solve the task; None where fewer than ``k`` attempts count."""
        return pass_hat_k(len(self.successes), sum(self.successes), k) if k <= len(self.successes) else None


@dataclass(frozen=True, repr=False)
class Scoreboard(Brief):
    """The scores of an evaluation. Attempts without a score, or that infrastructure spoiled, are in no mean.

    Attributes:
        tasks: the scores of each task, by its id, in the order in which the tasks came.
    """

    tasks: Mapping[str, TaskScores]

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> Scoreboard:
        """The scoreboard of some trajectories.

        Raises:
            ConfigError: two tasks of different content have one id.
            UsageError: something that is given is no trajectory.
        """
        attempts: dict[str, list[Trajectory]] = {}
        for trajectory in require_trajectories(trajectories, "Scoreboard.of"):
            known = attempts.setdefault(trajectory.task.id, [])
            if known and known[0].task.content != trajectory.task.content:
                raise ConfigError(
                    f"Two tasks have the id {trajectory.task.id!r}, so their scores cannot be told "
                    "apart. Give each task an id of its own."
                )
            known.append(trajectory)
        return cls({name: _scores(known) for name, known in attempts.items()})

    @property
    def scored(self) -> list[TaskScores]:
        """The tasks with an attempt that counts."""
        return [scores for scores in self.tasks.values() if scores.rewards]

    @property
    def left_out(self) -> dict[str, int]:
        """How many attempts count in nothing, by cause."""
        return dict(sum((Counter(scores.left_out) for scores in self.tasks.values()), Counter[str]()))

    @property
    def most_attempts(self) -> int:
        """The largest number of attempts at a task that count."""
        return max((len(scores.rewards) for scores in self.tasks.values()), default=0)

    def reward(self) -> Estimate | None:
        """Mean reward, with an interval clustered by task; None where nothing counts.

        The interval is that of a share where all rewards lie within 0 and 1, else Student's t.
        """
        if not self.scored:
            return None
        rewards = [scores.rewards for scores in self.scored]
        bounded = all(0.0 <= one <= 1.0 for task in rewards for one in task)
        return share_over_tasks(rewards) if bounded else mean_over_tasks(rewards)

    def success(self) -> Estimate | None:
        """Share of the attempts that solve their task, with a Wilson interval clustered by task; None as `reward`."""
        return share_over_tasks([scores.successes for scores in self.scored]) if self.scored else None

    def pass_at(self, k: int) -> Estimate | None:
        """Share of the tasks of which one of ``k`` attempts is solved, over those with as many attempts that count.

        The interval is that of a share, clustered by task. None where no task has as many.
        """
        return self._of_k(k, TaskScores.pass_at)

    def pass_hat(self, k: int) -> Estimate | None:
        """Share of the tasks of which all of ``k`` attempts are solved: pass^k. The rest is as of `pass_at`."""
        return self._of_k(k, TaskScores.pass_hat)

    def _of_k(self, k: int, chance_of: Callable[[TaskScores, int], float | None]) -> Estimate | None:
        if k == 1:
            return self.success()
        found = [(chance, len(one.rewards)) for one in self.scored if (chance := chance_of(one, k)) is not None]
        if not found:
            return None
        return share_over_tasks([[chance] for chance, _ in found], attempts=sum(count for _, count in found))

    def to_json(self, ks: Sequence[int]) -> dict[str, Any]:
        """Everything as JSON can hold it: the estimates, what was left out, and each task's scores."""
        return {
            "reward": _json_of(self.reward()),
            "success": _json_of(self.success()),
            "pass_at": {str(k): _json_of(self.pass_at(k)) for k in ks},
            "pass_hat": {str(k): _json_of(self.pass_hat(k)) for k in ks},
            "left_out": self.left_out,
            "tasks": [
                {"id": name, "rewards": scores.rewards, "successes": scores.successes, "left_out": scores.left_out}
                for name, scores in self.tasks.items()
            ],
        }


def usual_ks(attempts: int) -> list[int]:
    """The values of k that are told of so many attempts: 1, 2, 4, … and all of them."""
    return sorted({1, attempts, *(2**power for power in range(attempts.bit_length()))}) if attempts else []


def _scores(attempts: Sequence[Trajectory]) -> TaskScores:
    counted, left_out = [], Counter[str]()
    for trajectory in sorted(attempts, key=lambda one: one.attempt):
        cause = _cause(trajectory)
        if cause is None:
            counted.append(trajectory)
        else:
            left_out[cause] += 1
    return TaskScores(
        task=attempts[0].task,
        rewards=tuple(one.reward for one in counted if one.reward is not None),
        successes=tuple(bool(succeeded(one)) for one in counted),
        left_out=dict(left_out),
    )


def _cause(trajectory: Trajectory) -> str | None:
    """Why an attempt counts in nothing; None if it counts."""
    if trajectory.infrastructure_failed:
        return "infrastructure"
    if trajectory.finish is FinishReason.CANCELLED:
        return "cancelled"
    return "unscored" if trajectory.reward is None else None


def _json_of(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "tasks": estimate.tasks}

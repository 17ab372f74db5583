"""TaskOrder and Curriculum: which tasks each epoch contains, and in which order."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ConfigError, UsageError, type_of
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.rollouts.metrics import is_success


class TaskOrder:
    """An endless sequence of tasks. Each epoch contains every task once, in its own shuffled order.

    The cursor is an index into the sequence. The tasks, the seed and the cursor determine the rest of the sequence, so
    that a resumed run neither skips nor repeats a task.

    Args:
        tasks: the tasks of an epoch.
        seed: fixes the order.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for orders of the same tasks."""
        return hashlib.sha256("\n".join(task.canonical_json for task in self._tasks).encode()).hexdigest()[:16]

    def take(self, cursor: int, count: int) -> list[Task]:
        """The ``count`` tasks from ``cursor`` on."""
        size = len(self._tasks)
        epochs = {epoch: self._shuffled(epoch) for epoch in range(cursor // size, (cursor + count - 1) // size + 1)}
        return [self._tasks[epochs[index // size][index % size]] for index in range(cursor, cursor + count)]

    def extend_to(self, until: int) -> None:
        """Fix the order before this index, from the results recorded so far."""

    def record_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Record the results of rollouts."""

    def state(self, cursor: int) -> dict[str, Any]:
        """Return the state that a resume needs besides the cursor, as plain values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def metrics(self, cursor: int) -> dict[str, float]:
        """Return metrics of the order at the cursor."""
        return {"tasks/epoch": float(cursor // len(self._tasks))}

    def _shuffled(self, epoch: int) -> list[int]:
        indices = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(indices)
        return indices


MAX_HISTORY = 64
"""Number of the latest rollouts of a task that are remembered."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The results of a task so far. Unscored rollouts and infrastructure failures do not count.

    Attributes:
        tries: number of rollouts of the task.
        latest: whether each of the last `MAX_HISTORY` rollouts solved the task; oldest first.
    """

    tries: int = 0
    latest: tuple[bool, ...] = ()

    def success_rate(self, tries: int = MAX_HISTORY) -> float | None:
        """Return the fraction of the last ``tries`` rollouts that solved the task; None before the first."""
        last = self.latest[-tries:]
        return sum(last) / len(last) if last else None

    def after(self, solved: Iterable[bool]) -> TaskRecord:
        """Return the record with further results."""
        new = tuple(solved)
        return TaskRecord(self.tries + len(new), (*self.latest, *new)[-MAX_HISTORY:])


class Curriculum:
    """Chooses and orders the tasks of each epoch. A subclass overrides `keeps`, `rank` or both.

    Both are called for every task at the start of an epoch. They must depend on their arguments only, so that a resumed
    run has the same task order. If no task is kept, the epoch contains all of them.

    A resumed run needs a curriculum with the same ``repr`` as at its start.
    """

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({settings})"

    def keeps(self, task: Task, record: TaskRecord) -> bool:
        """Return whether the next epoch contains the task."""
        return True

    def rank(self, task: Task, record: TaskRecord) -> float:
        """Return the sort key of the task: lower ranks come first, equal ranks in random order."""
        return 0.0


@dataclass(frozen=True)
class BySuccessRate(Curriculum):
    """Skips tasks that are always or never solved, and orders the others by success rate, easiest first.

    An untried task is kept, with an assumed success rate of one half.

    Args:
        tries: number of a task's last rollouts to consider, at most `MAX_HISTORY`; a task with fewer is kept.
        skip_solved: skip tasks that all of these rollouts solved.
        skip_unsolved: skip tasks that none of these rollouts solved.
        easiest_first: sort by success rate; otherwise the order is random.
    """

    tries: int = 16
    skip_solved: bool = True
    skip_unsolved: bool = False
    easiest_first: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.tries <= MAX_HISTORY:
            raise ConfigError(f"tries={self.tries}: the last 1 to {MAX_HISTORY} rollouts of a task can be looked at.")

    def keeps(self, task: Task, record: TaskRecord) -> bool:
        if record.tries < self.tries:
            return True
        rate = record.success_rate(self.tries)
        return not ((self.skip_solved and rate == 1.0) or (self.skip_unsolved and rate == 0.0))

    def rank(self, task: Task, record: TaskRecord) -> float:
        rate = record.success_rate(self.tries)
        return -(0.5 if rate is None else rate) if self.easiest_first else 0.0


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The tasks of an epoch, as indices into the data set, and the epoch's start in the sequence."""

    number: int
    start: int
    indices: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.indices)


class CurriculumTaskOrder(TaskOrder):
    """A `TaskOrder` with a curriculum, which draws each epoch when it is first needed.

    Args:
        tasks, seed: see `TaskOrder`.
        curriculum: chooses and orders the tasks of each epoch.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, curriculum: Curriculum) -> None:
        super().__init__(tasks, seed)
        self._curriculum = curriculum
        self._records: dict[str, TaskRecord] = {}
        self._epochs: list[_Epoch] = []

    def take(self, cursor: int, count: int) -> list[Task]:
        """The ``count`` tasks from ``cursor`` on."""
        self.extend_to(cursor + count)
        return [
            self._tasks[self._epoch_at(index).indices[index - self._epoch_at(index).start]]
            for index in range(cursor, cursor + count)
        ]

    def extend_to(self, until: int) -> None:
        """Fix the order before this index, from the results recorded so far."""
        while not self._epochs or self._epochs[-1].stop < until:
            last = self._epochs[-1] if self._epochs else None
            number = last.number + 1 if last else 0
            self._epochs.append(_Epoch(number, last.stop if last else 0, self._draw_epoch(number)))

    def record_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Record the results of rollouts."""
        for trajectory in trajectories:
            solved = is_success(trajectory)
            if solved is not None and not trajectory.infrastructure_failed:
                record = self._records.get(trajectory.task.id, TaskRecord())
                self._records[trajectory.task.id] = record.after([solved])

    def state(self, cursor: int) -> dict[str, Any]:
        """Return the state that a resume needs besides the cursor, as plain values."""
        self._epochs = [epoch for epoch in self._epochs if epoch.stop > cursor] or self._epochs[-1:]
        return {
            "epochs": [[epoch.number, epoch.start, epoch.indices] for epoch in self._epochs],
            "records": {
                name: [record.tries, "".join(str(int(solved)) for solved in record.latest)]
                for name, record in self._records.items()
            },
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._epochs = [_Epoch(number, start, indices) for number, start, indices in state["epochs"]]
        self._records = {
            name: TaskRecord(tries, tuple(letter == "1" for letter in latest))
            for name, (tries, latest) in state["records"].items()
        }

    def metrics(self, cursor: int) -> dict[str, float]:
        """Return the epoch at the cursor and the number of tasks that it excludes."""
        epoch = self._epoch_at(max(cursor - 1, 0))
        return {"tasks/epoch": float(epoch.number), "tasks/excluded": float(len(self._tasks) - len(epoch.indices))}

    def _epoch_at(self, index: int) -> _Epoch:
        return next(epoch for epoch in reversed(self._epochs) if epoch.start <= index)

    def _draw_epoch(self, number: int) -> list[int]:
        indices = self._shuffled(number)
        kept = [index for index in indices if self._curriculum.keeps(*self._task_and_record(index))] or indices
        return sorted(kept, key=self._rank)

    def _rank(self, index: int) -> float:
        task, record = self._task_and_record(index)
        rank: object = self._curriculum.rank(task, record)
        if isinstance(rank, (int, float)) and not math.isnan(rank):
            return rank
        raise UsageError(
            f"The curriculum {self._curriculum!r} ranks the task {task.id!r} as {rank!r}, which is no number that "
            "tasks could be ordered by. Return a number from rank()."
        )

    def _task_and_record(self, index: int) -> tuple[Task, TaskRecord]:
        task = self._tasks[index]
        return task, self._records.get(task.id, TaskRecord())


def make_task_order(tasks: Sequence[Task], seed: int, curriculum: Curriculum | None) -> TaskOrder:
    """Return the task order of a run.

    Raises:
        UsageError: ``curriculum`` is not a `Curriculum`.
    """
    if curriculum is None:
        return TaskOrder(tasks, seed)
    if not isinstance(curriculum, Curriculum):
        raise UsageError(
            f"curriculum is {type_of(curriculum)}, not a Curriculum. Derive a class from it, and pass an object of "
            "that class, e.g. BySuccessRate()."
        )
    return CurriculumTaskOrder(tasks, seed, curriculum)

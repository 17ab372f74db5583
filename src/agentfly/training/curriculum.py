"""TaskOrder: which tasks come when, as a function of the seed alone.

Curriculum: which tasks an epoch has, and in which order, by what came of them before.
"""

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
    """An endless row of tasks: epochs, each with every task once, in an order of its own.

    A place in the row is a number, the cursor. Nothing has to be remembered but it: the same tasks, seed and cursor
    give the same tasks again, so that a run that goes on from a checkpoint skips none and repeats none.

    Args:
        tasks: the tasks of an epoch.
        seed: fixes the order.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """Tells whether two orders are made of the same tasks."""
        return hashlib.sha256("\n".join(task.canonical_json for task in self._tasks).encode()).hexdigest()[:16]

    def take(self, cursor: int, count: int) -> list[Task]:
        """The ``count`` tasks from ``cursor`` on."""
        size = len(self._tasks)
        epochs = {epoch: self._shuffled(epoch) for epoch in range(cursor // size, (cursor + count - 1) // size + 1)}
        return [self._tasks[epochs[place // size][place % size]] for place in range(cursor, cursor + count)]

    def extend_to(self, until: int) -> None:
        """Settle the order before this place by what is known now."""

    def record_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take in what came of tasks."""

    def state(self, cursor: int) -> dict[str, Any]:
        """What is needed besides the cursor to go on from there, as plain values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""

    def metrics(self, cursor: int) -> dict[str, float]:
        """The order at that place in numbers."""
        return {"tasks/epoch": float(cursor // len(self._tasks))}

    def _shuffled(self, epoch: int) -> list[int]:
        places = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(places)
        return places


MAX_HISTORY = 64
"""Rollouts of a task that are remembered, the latest ones."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What came of a task in the training so far. Rollouts that are unscored or spoiled do not count.

    Attributes:
        tries: number of its rollouts.
        latest: whether each of the last rollouts, up to `MAX_HISTORY` of them, solved it; oldest first.
    """

    tries: int = 0
    latest: tuple[bool, ...] = ()

    def success_rate(self, tries: int = MAX_HISTORY) -> float | None:
        """Share of the last ``tries`` rollouts that solved the task; None before the first."""
        last = self.latest[-tries:]
        return sum(last) / len(last) if last else None

    def after(self, solved: Iterable[bool]) -> TaskRecord:
        """The record with further rollouts."""
        new = tuple(solved)
        return TaskRecord(self.tries + len(new), (*self.latest, *new)[-MAX_HISTORY:])


class Curriculum:
    """Chooses and orders the tasks of each epoch. A subclass says how, by one of its methods or by both.

    They are asked when an epoch begins, of every task, and have to answer by their arguments alone, so that a run
    which is gone on with has the same order of tasks. An epoch that would be left with no task has them all.

    A run is gone on with by the same curriculum: one that says of itself (``repr``) what it said when the run began.
    """

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({settings})"

    def keeps(self, task: Task, record: TaskRecord) -> bool:
        """Whether the next epoch has the task."""
        return True

    def rank(self, task: Task, record: TaskRecord) -> float:
        """Tasks of lower rank come first; those of the same rank in an order of chance."""
        return 0.0


@dataclass(frozen=True)
class BySuccessRate(Curriculum):
    """Leaves out what is always or never solved, and takes what is solved more often first.

    A task that was not tried yet is kept, and comes between those that were solved more and less than half the time.

    Args:
        tries: how many of a task's last rollouts are looked at, at most `MAX_HISTORY`; with fewer it is kept.
        skip_solved: leave out tasks that all of these solved.
        skip_unsolved: leave out tasks that none of these solved.
        easiest_first: order the tasks; else they come in an order of chance.
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
    """The tasks of an epoch, by their places in the data set, and the place in the row where it begins."""

    number: int
    start: int
    places: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


class CurriculumTaskOrder(TaskOrder):
    """A `TaskOrder` whose epochs a curriculum draws, each when it is first asked for.

    Args:
        tasks, seed: as of `TaskOrder`.
        curriculum: draws the epochs.
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
            self._tasks[self._epoch_at(place).places[place - self._epoch_at(place).start]]
            for place in range(cursor, cursor + count)
        ]

    def extend_to(self, until: int) -> None:
        """Settle the order before this place by what is known now."""
        while not self._epochs or self._epochs[-1].stop < until:
            last = self._epochs[-1] if self._epochs else None
            number = last.number + 1 if last else 0
            self._epochs.append(_Epoch(number, last.stop if last else 0, self._draw_epoch(number)))

    def record_results(self, trajectories: Iterable[Trajectory]) -> None:
        """Take in what came of tasks."""
        for trajectory in trajectories:
            solved = is_success(trajectory)
            if solved is not None and not trajectory.infrastructure_failed:
                record = self._records.get(trajectory.task.id, TaskRecord())
                self._records[trajectory.task.id] = record.after([solved])

    def state(self, cursor: int) -> dict[str, Any]:
        """What is needed besides the cursor to go on from there, as plain values."""
        self._epochs = [epoch for epoch in self._epochs if epoch.stop > cursor] or self._epochs[-1:]
        return {
            "epochs": [[epoch.number, epoch.start, epoch.places] for epoch in self._epochs],
            "records": {
                name: [record.tries, "".join(str(int(solved)) for solved in record.latest)]
                for name, record in self._records.items()
            },
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._epochs = [_Epoch(number, start, places) for number, start, places in state["epochs"]]
        self._records = {
            name: TaskRecord(tries, tuple(letter == "1" for letter in latest))
            for name, (tries, latest) in state["records"].items()
        }

    def metrics(self, cursor: int) -> dict[str, float]:
        """The order at that place in numbers: the epoch, and how many tasks it leaves out."""
        epoch = self._epoch_at(max(cursor - 1, 0))
        return {"tasks/epoch": float(epoch.number), "tasks/left_out": float(len(self._tasks) - len(epoch.places))}

    def _epoch_at(self, place: int) -> _Epoch:
        return next(epoch for epoch in reversed(self._epochs) if epoch.start <= place)

    def _draw_epoch(self, number: int) -> list[int]:
        places = self._shuffled(number)
        kept = [place for place in places if self._curriculum.keeps(*self._task_and_record(place))] or places
        return sorted(kept, key=self._rank)

    def _rank(self, place: int) -> float:
        task, record = self._task_and_record(place)
        rank: object = self._curriculum.rank(task, record)
        if isinstance(rank, (int, float)) and not math.isnan(rank):
            return rank
        raise UsageError(
            f"The curriculum {self._curriculum!r} ranks the task {task.id!r} as {rank!r}, which is no number that "
            "tasks could be ordered by. Return a number from rank()."
        )

    def _task_and_record(self, place: int) -> tuple[Task, TaskRecord]:
        task = self._tasks[place]
        return task, self._records.get(task.id, TaskRecord())


def make_task_order(tasks: Sequence[Task], seed: int, curriculum: Curriculum | None) -> TaskOrder:
    """The order of tasks in a run.

    Raises:
        UsageError: ``curriculum`` is none.
    """
    if curriculum is None:
        return TaskOrder(tasks, seed)
    if not isinstance(curriculum, Curriculum):
        raise UsageError(
            f"curriculum is {type_of(curriculum)}, not a Curriculum. Derive a class from it, and pass an object of "
            "that class, e.g. BySuccessRate()."
        )
    return CurriculumTaskOrder(tasks, seed, curriculum)

"""Curriculum: which tasks an epoch has, and in which order, by what came of them before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ConfigError, UsageError, type_of
from agentfly.rollouts.summary import succeeded
from agentfly.task import Task
from agentfly.training.task_order import TaskOrder
from agentfly.trajectory import Trajectory

REMEMBERED = 64
"""Rollouts of a task that are remembered, the latest ones."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What came of a task in the training so far. Rollouts that are unscored or spoiled do not count.

    Attributes:
        tries: number of its rollouts.
        latest: whether each of the last rollouts, up to `REMEMBERED` of them, solved it; oldest first.
    """

    tries: int = 0
    latest: tuple[bool, ...] = ()

    def success_rate(self, tries: int = REMEMBERED) -> float | None:
        """Share of the last ``tries`` rollouts that solved the task; None before the first."""
        last = self.latest[-tries:]
        return sum(last) / len(last) if last else None

    def after(self, solved: Iterable[bool]) -> TaskRecord:
        """The record with further rollouts."""
        new = tuple(solved)
        return TaskRecord(self.tries + len(new), (*self.latest, *new)[-REMEMBERED:])


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
        tries: how many of a task's last rollouts are looked at, at most `REMEMBERED`; with fewer it is kept.
        skip_solved: leave out tasks that all of these solved.
        skip_unsolved: leave out tasks that none of these solved.
        easiest_first: order the tasks; else they come in an order of chance.
    """

    tries: int = 16
    skip_solved: bool = True
    skip_unsolved: bool = False
    easiest_first: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.tries <= REMEMBERED:
            raise ConfigError(f"tries={self.tries}: the last 1 to {REMEMBERED} rollouts of a task can be looked at.")

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


class GuidedOrder(TaskOrder):
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
        self.reach(cursor + count)
        return [
            self._tasks[self._epoch_at(place).places[place - self._epoch_at(place).start]]
            for place in range(cursor, cursor + count)
        ]

    def reach(self, until: int) -> None:
        """Settle the order before this place by what is known now."""
        while not self._epochs or self._epochs[-1].stop < until:
            last = self._epochs[-1] if self._epochs else None
            number = last.number + 1 if last else 0
            self._epochs.append(_Epoch(number, last.stop if last else 0, self._drawn(number)))

    def note(self, trajectories: Iterable[Trajectory]) -> None:
        """Take in what came of tasks."""
        for trajectory in trajectories:
            solved = succeeded(trajectory)
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

    def _drawn(self, number: int) -> list[int]:
        places = self._shuffled(number)
        kept = [place for place in places if self._curriculum.keeps(*self._known(place))] or places
        return sorted(kept, key=self._rank)

    def _rank(self, place: int) -> float:
        task, record = self._known(place)
        rank: object = self._curriculum.rank(task, record)
        if isinstance(rank, (int, float)) and not math.isnan(rank):
            return rank
        raise UsageError(
            f"The curriculum {self._curriculum!r} ranks the task {task.id!r} as {rank!r}, which is no number that "
            "tasks could be ordered by. Return a number from rank()."
        )

    def _known(self, place: int) -> tuple[Task, TaskRecord]:
        task = self._tasks[place]
        return task, self._records.get(task.id, TaskRecord())


def order_of(tasks: Sequence[Task], seed: int, curriculum: Curriculum | None) -> TaskOrder:
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
    return GuidedOrder(tasks, seed, curriculum)

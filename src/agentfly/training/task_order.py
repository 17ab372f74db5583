"""TaskOrder: which tasks come when, as a function of the seed alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

from agentfly.task import Task
from agentfly.trajectory import Trajectory


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
        return hashlib.sha256("\n".join(task.content for task in self._tasks).encode()).hexdigest()[:16]

    def take(self, cursor: int, count: int) -> list[Task]:
        """The ``count`` tasks from ``cursor`` on."""
        size = len(self._tasks)
        epochs = {epoch: self._shuffled(epoch) for epoch in range(cursor // size, (cursor + count - 1) // size + 1)}
        return [self._tasks[epochs[place // size][place % size]] for place in range(cursor, cursor + count)]

    def reach(self, until: int) -> None:
        """Settle the order before this place by what is known now."""

    def note(self, trajectories: Iterable[Trajectory]) -> None:
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

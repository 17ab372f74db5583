"""Feed: groups of rollouts in the order of the tasks, begun ahead of the training as far as it may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from types import TracebackType
from typing import Protocol, Self

from agentfly.core.errors import ConfigError
from agentfly.core.trajectory import Trajectory
from agentfly.rollouts.batch import Batch
from agentfly.rollouts.runner import Runner
from agentfly.training.curriculum import TaskOrder
from agentfly.training.journal import Journal

TRAIN, GREEDY = "train", "greedy"
"""What the ids of groups begin with: of the rollouts that are trained, and of those that are but a baseline."""


@dataclass(frozen=True)
class RolloutGroup:
    """What came of all attempts at one task.

    Attributes:
        number: place of the task in the order of tasks, from 0.
        trajectories: one an attempt, in order.
        greedy: a rollout of the most likely tokens, where the algorithm wants one as a baseline. It is not trained.
    """

    number: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None

    @property
    def group_id(self) -> str:
        """The id of the group."""
        return self.trajectories[0].group_id


class GroupSource(Protocol):
    """Where a step has its groups from."""

    def allow_until(self, until: int) -> None:
        """The groups before this number may begin."""
        ...

    async def take(self, number: int) -> RolloutGroup:
        """The group of that number, once all its attempts have ended; each is taken once."""
        ...


class RolloutQueue:
    """Runs rollouts of the tasks in their order, and hands their groups out.

    Nothing begins unless `allow_until` allows it: so the caller holds how far rollouts run ahead of the weights.

    Args:
        runner: runs the rollouts.
        order: the tasks.
        journal: where rollouts are kept as they end, and those are found that had ended in an earlier run.
        attempts: rollouts of each task.
        temperature: of the rollouts that are trained.
        first: number of the first group.
        greedy: whether there is to be one more rollout of each task, of the most likely tokens.
    """

    def __init__(
        self,
        runner: Runner,
        order: TaskOrder,
        journal: Journal,
        *,
        attempts: int,
        temperature: float,
        first: int,
        greedy: bool = False,
    ) -> None:
        self._order = order
        self._dispatched = first
        self._ended: list[Trajectory] = []
        self._arrived: dict[tuple[str, int], tuple[Trajectory, ...]] = {}
        self._greedy: Batch | None = None
        if greedy:
            self._greedy = runner.batch(
                label=GREEDY,
                sampling=lambda params: replace(params, temperature=0.0),
                record=journal,
                first_group=first,
            )
        self._batch = runner.batch(
            label=TRAIN,
            attempts=attempts,
            sampling=lambda params: replace(params, temperature=temperature),
            record=journal,
            first_group=first,
        )
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for batch in self._batches():
            await self._open.enter_async_context(batch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def allow_until(self, until: int) -> None:
        """The groups before this number may begin."""
        if until > self._dispatched:
            tasks = self._order.take(self._dispatched, until - self._dispatched)
            self._dispatched = until
            for batch in self._batches():
                batch.add(tasks)

    async def take(self, number: int) -> RolloutGroup:
        """The group of that number, which may begin, once all its attempts have ended.

        Raises:
            TooManyFailures: infrastructure has spoiled too many rollouts.
        """
        trajectories = await self._complete_group(self._batch, TRAIN, number)
        greedy = None if self._greedy is None else (await self._complete_group(self._greedy, GREEDY, number))[0]
        return RolloutGroup(number, trajectories, greedy)

    def pop_finished(self) -> list[Trajectory]:
        """The rollouts that have ended since this was asked last, whatever becomes of them; not the greedy ones."""
        ended, self._ended = self._ended, []
        return ended

    async def _complete_group(self, batch: Batch, label: str, number: int) -> tuple[Trajectory, ...]:
        while (label, number) not in self._arrived:
            came = await batch.take(1)
            self._arrived.update(((label, one), group) for one, group in group_by_number(came).items())
            if batch is self._batch:
                self._ended += came
        return self._arrived.pop((label, number))

    def _batches(self) -> list[Batch]:
        return [self._batch] if self._greedy is None else [self._greedy, self._batch]  # a baseline is but one rollout


class ReplaySource:
    """Hands out the groups of a step whose rollouts are all on file, in a run that is gone on with.

    Args:
        order: the tasks.
        step: the step, for messages.
        trained, greedy: what its files hold.
    """

    def __init__(
        self, order: TaskOrder, step: int, trained: Iterable[Trajectory], greedy: Iterable[Trajectory]
    ) -> None:
        self._order = order
        self._step = step
        self._groups = group_by_number(trained)
        self._greedy = group_by_number(greedy)

    def allow_until(self, until: int) -> None:
        """Settle the order of the tasks as far as the run had settled it here."""
        self._order.extend_to(until)

    async def take(self, number: int) -> RolloutGroup:
        """The group of that number.

        Raises:
            ConfigError: the files hold another step than this one.
        """
        group = self._groups.get(number, ())
        tasks = [task.id for task in self._order.take(number, 1)]
        if not group or [group[0].task.id] != tasks:
            raise ConfigError(
                f"The rollouts of step {self._step} are not those of this run: at place {number} of the order of tasks "
                f"they have {group[0].task.id if group else 'nothing'!r}, and not {tasks[0]!r}. Begin a new run."
            )
        return RolloutGroup(number, group, self._greedy[number][0] if number in self._greedy else None)


def group_by_number(trajectories: Iterable[Trajectory]) -> dict[int, tuple[Trajectory, ...]]:
    """Trajectories, those of a group side by side, by the number of their group."""
    groups: dict[int, Sequence[Trajectory]] = {}
    for group_id, group in groupby(trajectories, key=lambda trajectory: trajectory.group_id):
        groups[int(group_id.rpartition("-")[2])] = tuple(group)
    return {number: tuple(group) for number, group in groups.items()}

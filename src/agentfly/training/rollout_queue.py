"""RolloutQueue: runs rollout groups in task order, ahead of training up to a limit."""

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
"""Prefixes of group ids: trained rollouts, and greedy rollouts that serve only as a baseline."""


@dataclass(frozen=True)
class RolloutGroup:
    """All attempts at one task.

    Attributes:
        number: index of the task in the task order, from 0.
        trajectories: one per attempt, in order.
        greedy: the greedy rollout, if the algorithm needs one as a baseline. It is not trained on.
    """

    number: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None

    @property
    def group_id(self) -> str:
        """The id of the group."""
        return self.trajectories[0].group_id


class GroupSource(Protocol):
    """Provides the groups of a step."""

    def allow_until(self, until: int) -> None:
        """Allow the groups before this number to start."""
        ...

    async def take(self, number: int) -> RolloutGroup:
        """Return the group with this number when all its attempts have finished. Each group is taken once."""
        ...


class RolloutQueue:
    """Runs rollouts in task order and returns them in groups.

    A group starts only when `allow_until` allows it. The caller thereby limits how far rollouts run ahead of updates.

    Args:
        runner: runs the rollouts.
        order: the tasks.
        journal: stores finished rollouts, and provides those that finished in an earlier process.
        attempts: number of rollouts per task.
        temperature: sampling temperature of the trained rollouts.
        first: number of the first group.
        greedy: whether each task also gets a greedy rollout.
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
        self._allowed = first
        self._finished: list[Trajectory] = []
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
        """Allow the groups before this number to start."""
        if until > self._allowed:
            tasks = self._order.take(self._allowed, until - self._allowed)
            self._allowed = until
            for batch in self._batches():
                batch.add(tasks)

    async def take(self, number: int) -> RolloutGroup:
        """Return the group with this number when all its attempts have finished. It must have been allowed to start.

        Raises:
            FailureBudgetExceeded: too many rollouts failed because of infrastructure.
        """
        trajectories = await self._complete_group(self._batch, TRAIN, number)
        greedy = None if self._greedy is None else (await self._complete_group(self._greedy, GREEDY, number))[0]
        return RolloutGroup(number, trajectories, greedy)

    def pop_finished(self) -> list[Trajectory]:
        """Return the rollouts that finished since the last call, without the greedy ones."""
        finished, self._finished = self._finished, []
        return finished

    async def _complete_group(self, batch: Batch, label: str, number: int) -> tuple[Trajectory, ...]:
        while (label, number) not in self._arrived:
            finished = await batch.take(1)
            self._arrived.update(((label, one), group) for one, group in group_by_number(finished).items())
            if batch is self._batch:
                self._finished += finished
        return self._arrived.pop((label, number))

    def _batches(self) -> list[Batch]:
        return (
            [self._batch] if self._greedy is None else [self._greedy, self._batch]
        )  # greedy first: one rollout per task


class ReplaySource:
    """Returns the groups of a saved step in a resumed run.

    Args:
        order: the tasks.
        step: the step, for messages.
        trained, greedy: the contents of the step's files.
    """

    def __init__(
        self, order: TaskOrder, step: int, trained: Iterable[Trajectory], greedy: Iterable[Trajectory]
    ) -> None:
        self._order = order
        self._step = step
        self._groups = group_by_number(trained)
        self._greedy = group_by_number(greedy)

    def allow_until(self, until: int) -> None:
        """Fix the task order as far as the original run had fixed it."""
        self._order.extend_to(until)

    async def take(self, number: int) -> RolloutGroup:
        """Return the group with this number.

        Raises:
            ConfigError: the files belong to other tasks.
        """
        group = self._groups.get(number, ())
        tasks = [task.id for task in self._order.take(number, 1)]
        if not group or [group[0].task.id] != tasks:
            raise ConfigError(
                f"The saved rollouts of step {self._step} do not belong to this run: at index {number} of the task "
                f"order they have {group[0].task.id if group else 'nothing'!r} instead of {tasks[0]!r}. Start a new "
                "run."
            )
        return RolloutGroup(number, group, self._greedy[number][0] if number in self._greedy else None)


def group_by_number(trajectories: Iterable[Trajectory]) -> dict[int, tuple[Trajectory, ...]]:
    """Group trajectories by the number of their group. The trajectories of a group must be consecutive."""
    groups: dict[int, Sequence[Trajectory]] = {}
    for group_id, group in groupby(trajectories, key=lambda trajectory: trajectory.group_id):
        groups[int(group_id.rpartition("-")[2])] = tuple(group)
    return {number: tuple(group) for number, group in groups.items()}

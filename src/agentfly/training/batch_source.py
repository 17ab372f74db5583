"""What the attempts at tasks teach: their rows within the limits, their baselines, and whether an advantage is left.

Harvest: the groups that one step is trained on, and how it comes by them.

Supply: where each step has its groups from, its files or rollouts, and where they are put on file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from agentfly.core.errors import PrerequisiteError
from agentfly.core.run_directory import RunDirectory
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.core.trajectory import Trajectory, load_trajectories, save_trajectories
from agentfly.rollouts.failure_budget import FailureBudget
from agentfly.rollouts.runner import Runner
from agentfly.training.advantages import AdvantageInputs
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.curriculum import TaskOrder
from agentfly.training.journal import Journal
from agentfly.training.rollout_queue import GREEDY, TRAIN, GroupSource, ReplaySource, RolloutGroup, RolloutQueue
from agentfly.training.rows import RowBatch, apply_row_limits, overlong_penalty, rows_from_trajectories


def make_rows(trajectories: Iterable[Trajectory], config: TrainConfig) -> RowBatch:
    """The rows of trajectories, with rewards less the penalty on length, and cut where they are too long."""
    batch = rows_from_trajectories(trajectories)
    return apply_row_limits(batch, overlong=config.overlong, max_row_tokens=config.max_row_tokens)


def greedy_baselines(groups: Iterable[RolloutGroup], config: TrainConfig) -> dict[str, float]:
    """The rewards of greedy rollouts that are sound, by the ids of their groups.

    They are less the penalty on length, as the rewards that are compared with them.
    """
    baselines = {}
    for group in groups:
        greedy = group.greedy
        if greedy is None or greedy.reward is None or greedy.infrastructure_failed:
            continue
        sampled = sum(sequence.sampled_count for sequence in greedy.own_sequences)
        penalty = 0.0 if config.overlong is None else overlong_penalty(sampled, config.overlong)
        baselines[group.group_id] = greedy.reward - penalty
    return baselines


def has_learning_signal(group: RolloutGroup, config: TrainConfig) -> bool:
    """Whether the algorithm, asked about a group alone, leaves any of its tokens an advantage.

    Only algorithms with ``supports_dynamic_sampling`` can be asked.
    """
    algorithm = config.chosen_algorithm
    rows = make_rows(group.trajectories, config).rows
    baselines = greedy_baselines([group], config) if algorithm.needs_greedy else None
    if not rows or (baselines is not None and group.group_id not in baselines):
        return False
    judged = algorithm.estimate(AdvantageInputs(rows, baselines=baselines), config.advantage)
    return any(values.any() for values in judged.values)


@dataclass(frozen=True)
class StepBatch:
    """The groups of one step.

    Attributes:
        trained_groups: those that are trained on, in the order of the tasks.
        dropped_groups: those that teach nothing, in the order of the tasks; none without dynamic sampling.
        refills: how often others were rolled out in their place.
    """

    trained_groups: tuple[RolloutGroup, ...]
    dropped_groups: tuple[RolloutGroup, ...] = ()
    refills: int = 0

    @property
    def groups(self) -> list[RolloutGroup]:
        """All of them, in the order of the tasks."""
        return sorted((*self.trained_groups, *self.dropped_groups), key=lambda group: group.number)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rollouts of all groups, the greedy ones apart."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def trained_trajectories(self) -> list[Trajectory]:
        """The rollouts of the groups that are trained on."""
        return [trajectory for group in self.trained_groups for trajectory in group.trajectories]

    @property
    def greedy(self) -> list[Trajectory]:
        """The greedy rollouts."""
        return [group.greedy for group in self.groups if group.greedy is not None]

    @property
    def metrics(self) -> dict[str, float]:
        """How many groups it took, and how many of them were dropped."""
        return {
            "sampling/groups": float(len(self.trained_groups) + len(self.dropped_groups)),
            "sampling/dropped_groups": float(len(self.dropped_groups)),
            "sampling/refills": float(self.refills),
        }


async def collect_step_batch(source: GroupSource, cursor: int, config: TrainConfig, *, steps_left: int) -> StepBatch:
    """Gather the groups of the step that begins at ``cursor``, oldest first.

    While they are gathered, the groups of the next ``max_staleness`` steps may run too: what begins under the weights
    of now is trained after at most so many updates, since every step takes its groups from the head of the order. With
    dynamic sampling, groups that teach nothing are made up for by the next groups of the order, so that the same groups
    come to the same steps, whatever ended first.

    Args:
        source: where the groups come from.
        cursor: number of the first.
        config: the run's settings.
        steps_left: how many steps come after this one.

    Raises:
        TooManyFailures: infrastructure spoiled too large a share of the rollouts.
    """
    ahead = config.tasks_per_step * min(config.max_staleness, steps_left)
    at_a_time = (config.tasks_per_step + ahead) * config.attempts
    if config.max_concurrent_rollouts is not None:
        at_a_time = min(at_a_time, config.max_concurrent_rollouts)
    health = FailureBudget(config.max_failure_share, lambda: at_a_time)
    refills_left = config.dynamic_sampling.max_refills if config.dynamic_sampling else 0
    kept: list[RolloutGroup] = []
    dropped: list[RolloutGroup] = []
    refills, wanted, asked = 0, config.tasks_per_step, 0
    source.allow_until(cursor + wanted + ahead)
    while wanted:
        lacking, asked = 0, asked + wanted
        for number in range(cursor, cursor + wanted):
            group = await source.take(number)
            _count_failures(health, group, asked * config.attempts)
            if config.dynamic_sampling is None or has_learning_signal(group, config):
                kept.append(group)
                continue
            dropped.append(group)
            lacking += 1
            if refills_left:
                source.allow_until(cursor + wanted + lacking + ahead)
        cursor += wanted
        wanted = lacking if refills_left else 0
        if wanted:
            refills, refills_left = refills + 1, refills_left - 1
    if (error := health.error_if_all_failed()) is not None:
        raise error
    return StepBatch(tuple(kept), tuple(dropped), refills)


def _count_failures(health: FailureBudget, group: RolloutGroup, rollouts: int) -> None:
    for trajectory in group.trajectories:
        if (error := health.record(trajectory, rollouts=rollouts)) is not None:
            raise error


class BatchSource:
    """Gathers the groups of each step, and puts them on file before anything is learned from them.

    Args:
        run: the run's directory.
        order: the tasks.
        runner: runs the rollouts.
        journal: keeps them until they are in a step's file.
        config: the run's settings.
        temperature: of the rollouts that are trained.
        greedy: whether each task has a greedy rollout besides.
        on_file: the last step of which a killed run has left the file.
    """

    def __init__(
        self,
        run: RunDirectory,
        order: TaskOrder,
        runner: Runner,
        journal: Journal,
        config: TrainConfig,
        *,
        temperature: float,
        greedy: bool,
        on_file: int,
    ) -> None:
        self._run = run
        self._order = order
        self._runner = runner
        self._journal = journal
        self._config = config
        self._temperature = temperature
        self._with_greedy = greedy
        self._on_file = on_file
        self._feed: RolloutQueue | None = None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def next_batch(self, step: int, cursor: int) -> StepBatch:
        """The groups of a step, which are on file when this returns.

        Args:
            step: the step.
            cursor: number of its first group.

        Raises:
            TooManyFailures: infrastructure spoiled too large a share of the rollouts.
        """
        gather = partial(collect_step_batch, cursor=cursor, config=self._config, steps_left=self._config.steps - step)
        if step <= self._on_file:
            gathered = await gather(await run_in_thread_to_completion(partial(self._replay, step)))
        else:
            gathered = await gather(await self._open_queue(cursor))
            await run_in_thread_to_completion(partial(self._save_step, step, gathered))
        numbers = [group.number for group in gathered.groups]
        labels = (TRAIN, GREEDY) if self._with_greedy else (TRAIN,)
        await self._journal.remove_groups(f"{label}-{number}" for number in numbers for label in labels)
        return gathered

    def pop_finished(self) -> list[Trajectory]:
        """The rollouts that have ended since this was asked last, whatever becomes of them."""
        return [] if self._feed is None else self._feed.pop_finished()

    async def _open_queue(self, cursor: int) -> RolloutQueue:
        """The feed, begun with the first step that is on no file."""
        if self._feed is None:
            feed = RolloutQueue(
                self._runner,
                self._order,
                self._journal,
                attempts=self._config.attempts,
                temperature=self._temperature,
                first=cursor,
                greedy=self._with_greedy,
            )
            self._feed = await self._open.enter_async_context(feed)
        return self._feed

    def _replay(self, step: int) -> ReplaySource:
        greedy = self._run.trajectories_file(step, "greedy")
        return ReplaySource(
            self._order,
            step,
            load_trajectories(self._run.trajectories_file(step)),
            load_trajectories(greedy) if greedy.exists() else (),
        )

    def _save_step(self, step: int, gathered: StepBatch) -> None:
        """Write the files of a step; that of the trained rollouts comes last, and says that the step is on file."""
        if gathered.greedy:
            atomic_file(gathered.greedy, self._run.trajectories_file(step, "greedy"))
        atomic_file(gathered.trajectories, self._run.trajectories_file(step))


def atomic_file(trajectories: Sequence[Trajectory], path: Path) -> None:
    """Write a file that is whole or not there at all, whenever the process or the machine stops.

    Raises:
        PrerequisiteError: it cannot be written.
    """
    unfinished = path.with_suffix(".unfinished")
    try:
        save_trajectories(trajectories, unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise PrerequisiteError(
            f"The rollouts of a step cannot be written to {path}: {error.strerror}. They are kept in the run's "
            "journal. Free some space, and go on with --resume (in Python: resume=True)."
        ) from error

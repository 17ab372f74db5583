"""BatchSource: collects the rollout groups of each training step and saves them before the update.

A resumed run reads the groups of a saved step from its files. Other steps take them from the `RolloutQueue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from agentfly.core.errors import PrerequisiteError
from agentfly.core.files import atomic_write
from agentfly.core.run_directory import RunDirectory
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.core.trajectory import Trajectory, load_trajectories, trajectory_json_line
from agentfly.rollouts.failure_budget import FailureBudget
from agentfly.rollouts.runner import Runner
from agentfly.training.advantages import AdvantageInputs
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.curriculum import TaskOrder
from agentfly.training.journal import Journal
from agentfly.training.rollout_queue import GREEDY, TRAIN, GroupSource, ReplaySource, RolloutGroup, RolloutQueue
from agentfly.training.rows import RowBatch, apply_row_limits, overlong_penalty, rows_from_trajectories


def make_rows(trajectories: Iterable[Trajectory], config: TrainConfig) -> RowBatch:
    """Return the training rows of trajectories, after the overlong penalty and truncation."""
    batch = rows_from_trajectories(trajectories)
    return apply_row_limits(batch, overlong=config.overlong, max_row_tokens=config.max_row_tokens)


def greedy_baselines(groups: Iterable[RolloutGroup], config: TrainConfig) -> dict[str, float]:
    """Return the rewards of valid greedy rollouts by group id, after the overlong penalty."""
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
    """Return whether the algorithm gives any token of this group a nonzero advantage.

    The algorithm must have ``supports_dynamic_sampling``.
    """
    algorithm = config.chosen_algorithm
    rows = make_rows(group.trajectories, config).rows
    baselines = greedy_baselines([group], config) if algorithm.needs_greedy else None
    if not rows or (baselines is not None and group.group_id not in baselines):
        return False
    advantages = algorithm.estimate(AdvantageInputs(rows, baselines=baselines), config.advantage)
    return any(values.any() for values in advantages.values)


@dataclass(frozen=True)
class StepBatch:
    """The rollout groups of one step.

    Attributes:
        trained_groups: the groups to train on, in task order.
        dropped_groups: groups without a learning signal, in task order; empty without dynamic sampling.
        refills: number of times that replacement groups were rolled out.
    """

    trained_groups: tuple[RolloutGroup, ...]
    dropped_groups: tuple[RolloutGroup, ...] = ()
    refills: int = 0

    @property
    def groups(self) -> list[RolloutGroup]:
        """All groups, in task order."""
        return sorted((*self.trained_groups, *self.dropped_groups), key=lambda group: group.number)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rollouts of all groups, without the greedy ones."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def trained_trajectories(self) -> list[Trajectory]:
        """The rollouts of the trained groups."""
        return [trajectory for group in self.trained_groups for trajectory in group.trajectories]

    @property
    def greedy(self) -> list[Trajectory]:
        """The greedy rollouts."""
        return [group.greedy for group in self.groups if group.greedy is not None]

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of groups, dropped groups and refills."""
        return {
            "sampling/groups": float(len(self.trained_groups) + len(self.dropped_groups)),
            "sampling/dropped_groups": float(len(self.dropped_groups)),
            "sampling/refills": float(self.refills),
        }


async def collect_step_batch(source: GroupSource, cursor: int, config: TrainConfig, *, steps_left: int) -> StepBatch:
    """Collect the groups of the step that starts at ``cursor``, in task order.

    While a step is collected, groups of the next ``max_staleness`` steps may also run. A group that starts under the
    current weights is trained at most ``max_staleness`` updates later, because steps consume groups in task order.
    Dynamic sampling replaces groups without a learning signal by the next groups of the order. The assignment of groups
    to steps therefore does not depend on which group finishes first.

    Args:
        source: provides the groups.
        cursor: number of the first group.
        config: the run's settings.
        steps_left: number of steps after this one.

    Raises:
        FailureBudgetExceeded: too many rollouts failed because of infrastructure.
    """
    ahead = config.tasks_per_step * min(config.max_staleness, steps_left)
    at_a_time = (config.tasks_per_step + ahead) * config.attempts
    if config.max_concurrent_rollouts is not None:
        at_a_time = min(at_a_time, config.max_concurrent_rollouts)
    health = FailureBudget(config.max_failure_rate, lambda: at_a_time)
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
    """Collects the groups of each step and saves them before the update.

    Args:
        run: the run's directory.
        order: the tasks.
        runner: runs the rollouts.
        journal: keeps finished rollouts until the step's file contains them.
        config: the run's settings.
        temperature: sampling temperature of the trained rollouts.
        greedy: whether each task also gets a greedy rollout.
        on_file: the last step whose file an interrupted run has saved.
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
        self._rollouts: RolloutQueue | None = None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def next_batch(self, step: int, cursor: int) -> StepBatch:
        """Return the groups of a step, saved to the step's files.

        Args:
            step: the step.
            cursor: number of its first group.

        Raises:
            FailureBudgetExceeded: too many rollouts failed because of infrastructure.
        """
        collect = partial(collect_step_batch, cursor=cursor, config=self._config, steps_left=self._config.steps - step)
        if step <= self._on_file:
            batch = await collect(await run_in_thread_to_completion(partial(self._replay, step)))
        else:
            batch = await collect(await self._open_queue(cursor))
            await run_in_thread_to_completion(partial(self._save_step, step, batch))
        numbers = [group.number for group in batch.groups]
        labels = (TRAIN, GREEDY) if self._with_greedy else (TRAIN,)
        await self._journal.remove_groups(f"{label}-{number}" for number in numbers for label in labels)
        return batch

    def pop_finished(self) -> list[Trajectory]:
        """Return the rollouts that finished since the last call, whether or not they are trained on."""
        return [] if self._rollouts is None else self._rollouts.pop_finished()

    async def _open_queue(self, cursor: int) -> RolloutQueue:
        """Return the queue; the first step without a saved file opens it."""
        if self._rollouts is None:
            rollouts = RolloutQueue(
                self._runner,
                self._order,
                self._journal,
                attempts=self._config.attempts,
                temperature=self._temperature,
                first=cursor,
                greedy=self._with_greedy,
            )
            self._rollouts = await self._open.enter_async_context(rollouts)
        return self._rollouts

    def _replay(self, step: int) -> ReplaySource:
        greedy = self._run.trajectories_file(step, "greedy")
        return ReplaySource(
            self._order,
            step,
            load_trajectories(self._run.trajectories_file(step)),
            load_trajectories(greedy) if greedy.exists() else (),
        )

    def _save_step(self, step: int, batch: StepBatch) -> None:
        """Write the files of a step. The training file comes last and marks the step as saved."""
        if batch.greedy:
            write_trajectories_atomically(batch.greedy, self._run.trajectories_file(step, "greedy"))
        write_trajectories_atomically(batch.trajectories, self._run.trajectories_file(step))


def write_trajectories_atomically(trajectories: Sequence[Trajectory], path: Path) -> None:
    """Write a file that is either complete or absent, even after a crash or power loss.

    Raises:
        PrerequisiteError: the file cannot be written.
    """
    try:
        with atomic_write(path) as file:
            file.writelines(trajectory_json_line(trajectory).encode("utf-8") for trajectory in trajectories)
    except OSError as error:
        raise PrerequisiteError(
            f"The rollouts of a step cannot be written to {path}: {error.strerror}. They are kept in the run's "
            "journal. Free some space, and continue with --resume (in Python: resume=True)."
        ) from error

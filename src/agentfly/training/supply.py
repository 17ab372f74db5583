"""Supply: where each step has its groups from, its files or rollouts, and where they are put on file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from agentfly.errors import PrerequisiteError
from agentfly.rollouts.runner import Runner
from agentfly.run_directory import RunDirectory
from agentfly.threads.pool import on_thread_to_its_end
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.feed import GREEDY, TRAIN, Feed, Replay
from agentfly.training.harvest import Harvest, harvest
from agentfly.training.journal import Journal
from agentfly.training.task_order import TaskOrder
from agentfly.trajectory import Trajectory, load_trajectories, save_trajectories


class Supply:
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
        self._feed: Feed | None = None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def harvest(self, step: int, cursor: int) -> Harvest:
        """The groups of a step, which are on file when this returns.

        Args:
            step: the step.
            cursor: number of its first group.

        Raises:
            TooManyFailures: infrastructure spoiled too large a share of the rollouts.
        """
        gather = partial(harvest, cursor=cursor, config=self._config, steps_left=self._config.steps - step)
        if step <= self._on_file:
            gathered = await gather(await on_thread_to_its_end(partial(self._replay, step)))
        else:
            gathered = await gather(await self._feeding(cursor))
            await on_thread_to_its_end(partial(self._put_on_file, step, gathered))
        numbers = [group.number for group in gathered.groups]
        labels = (TRAIN, GREEDY) if self._with_greedy else (TRAIN,)
        await self._journal.forget(f"{label}-{number}" for number in numbers for label in labels)
        return gathered

    def ended(self) -> list[Trajectory]:
        """The rollouts that have ended since this was asked last, whatever becomes of them."""
        return [] if self._feed is None else self._feed.ended()

    async def _feeding(self, cursor: int) -> Feed:
        """The feed, begun with the first step that is on no file."""
        if self._feed is None:
            feed = Feed(
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

    def _replay(self, step: int) -> Replay:
        greedy = self._run.trajectories_file(step, "greedy")
        return Replay(
            self._order,
            step,
            load_trajectories(self._run.trajectories_file(step)),
            load_trajectories(greedy) if greedy.exists() else (),
        )

    def _put_on_file(self, step: int, gathered: Harvest) -> None:
        """Write the files of a step; that of the trained rollouts comes last, and says that the step is on file."""
        if gathered.greedy:
            _write_whole(gathered.greedy, self._run.trajectories_file(step, "greedy"))
        _write_whole(gathered.trajectories, self._run.trajectories_file(step))


def _write_whole(trajectories: Sequence[Trajectory], path: Path) -> None:
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

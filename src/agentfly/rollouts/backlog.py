"""Rollouts of a batch that have not begun: groups of attempts, and prefetching for the tasks that come next."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace

from agentfly.core.errors import Boundary
from agentfly.core.run_directory import whole_number
from agentfly.core.task import Row, Task, as_task
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.rollouts.rollout import RunnerDependencies


@dataclass(eq=False, slots=True)
class AttemptGroup:
    """The attempts at one task: waiting, running and finished.

    Attributes:
        group_id: the group's id.
        task: the task.
        occurrence: number of earlier groups of the batch whose task has the same id.
        attempts: total number of attempts.
        begun: number of attempts that have begun.
        ended: trajectories of the finished attempts, in the order in which they finished.
        cancelled: whether the group was cancelled: no further attempt begins, and running ones end.
        scored: number of attempts that were scored as a group in an earlier run.
        partly_delivered: whether a trajectory of the group was delivered on its own.
    """

    group_id: str
    task: Task
    occurrence: int
    attempts: int
    begun: int = 0
    ended: list[Trajectory] = field(default_factory=list)
    cancelled: bool = False
    scored: int = 0
    partly_delivered: bool = False

    @property
    def waiting(self) -> int:
        """Number of attempts that have not begun."""
        return 0 if self.cancelled else self.attempts - self.begun

    @property
    def settled(self) -> bool:
        """Whether no attempt waits or runs."""
        return not self.waiting and len(self.ended) == self.begun

    @property
    def complete(self) -> bool:
        """Whether every attempt has finished without being cancelled."""
        finishes = [trajectory.finish_reason for trajectory in self.ended]
        return len(finishes) == self.attempts and FinishReason.CANCELLED not in finishes

    @property
    def by_attempt(self) -> list[Trajectory]:
        """Trajectories of the finished attempts, in the order of the attempts."""
        return sorted(self.ended, key=lambda trajectory: trajectory.attempt)

    def begin(self) -> Trajectory:
        """Begin the next attempt. Return its empty trajectory."""
        attempt = self.begun
        self.begun += 1
        return Trajectory(f"{self.group_id}.{attempt}", self.group_id, self.task, attempt)

    def cancel_ended(self) -> int:
        """Mark the finished attempts as cancelled. Return how many of them had succeeded.

        They are replaced by copies, so that scoring that ignores its cancellation cannot change them.
        """
        sound = [trajectory for trajectory in self.ended if not trajectory.infrastructure_failed]
        self.ended = [
            replace(one, finish_reason=FinishReason.CANCELLED, reward=None)
            if not one.infrastructure_failed
            else replace(one)
            for one in self.ended
        ]
        return len(sound)

    def mark_unscored(self, error: BaseException) -> None:
        """Leave the attempts unscored, because scoring the group raised ``error``."""
        for trajectory in self.ended:
            trajectory.reward = None
            trajectory.reward_failure = trajectory.reward_failure or Failure.of(error, Boundary.REWARD)


logger = logging.getLogger(__name__)

PREFETCH_TASKS = 8
"""How many tasks ahead of the next one are prepared: enough to keep fetching, too few to fill a disk."""


class Prefetcher:
    """Prefetches the resources that tools and reward declare for upcoming tasks.

    Args:
        dependencies: what all rollouts share.
    """

    def __init__(self, dependencies: RunnerDependencies) -> None:
        self._dependencies = dependencies

    def prefetch(self, task: Task) -> None:
        """Prefetch for a task whose rollouts begin soon."""
        try:
            specs = self._dependencies.resources_for(task)
            self._dependencies.engine.prefetch(spec for spec in specs if spec.preparation_key is not None or spec.warm)
        except Exception as error:  # also of a user's own spec
            logger.debug("Nothing is prefetched for task %s; its rollouts will report why: %s", task.id, error)


class Backlog:
    """Groups of attempts that wait, in the order in which they were added. Tasks are read only as far as needed.

    Args:
        label: prefix of the groups' ids, before their numbers.
        expect: called with each task, some tasks before its rollouts begin.
        first: number of the first group.
    """

    def __init__(self, label: str, expect: Callable[[Task], None], first: int = 0) -> None:
        self._label = label
        self._expect = expect
        self._sources: deque[tuple[Iterator[Row], int]] = deque()
        self._read: deque[AttemptGroup] = deque()
        self._numbers = first
        self._unwanted: set[int] = set()
        self._occurrences: Counter[str] = Counter()
        self._unread: int | None = 0

    @property
    def rollouts(self) -> int | None:
        """Number of waiting rollouts; None while it is unknown because an iterator has not been read to its end."""
        return None if self._unread is None else self._unread + sum(group.waiting for group in self._read)

    def add(self, tasks: Iterable[Row], attempts: int) -> None:
        """Add a group of ``attempts`` rollouts for each task."""
        size = len(tasks) if isinstance(tasks, Sized) else None
        self._sources.append((iter(tasks), attempts))
        if size is None:
            self._unread = None
        elif self._unread is not None:
            self._unread += size * attempts

    def next_group(self) -> AttemptGroup | None:
        """Return the group whose next attempt begins next; None if nothing waits.

        Raises:
            ConfigError: the iterator returned something that is not a task and cannot be converted to one.
            Exception: the iterator raised it.
        """
        while True:
            while self._sources and len(self._read) <= PREFETCH_TASKS:
                self._read_one()
            if not self._read or self._read[0].waiting:
                break
            self._read.popleft()
        return self._read[0] if self._read else None

    def cancel(self, group_id: str) -> bool:
        """Let no further attempt of a group begin. Return False if no such group waits or can still be read."""
        label, _, written = group_id.rpartition("-")
        number = whole_number(written)
        if label != self._label or number is None or str(number) != written:
            return False
        if number >= self._numbers:
            if self._sources:
                self._unwanted.add(number)
            return bool(self._sources)
        group = next((group for group in self._read if group.group_id == group_id), None)
        if group is not None:
            group.cancelled = True
        return group is not None

    def clear(self) -> None:
        """Discard all waiting rollouts."""
        self._sources.clear()
        self._read.clear()
        self._unread = 0

    def _read_one(self) -> None:
        tasks, attempts = self._sources[0]
        try:
            task = as_task(next(tasks))
        except StopIteration:
            self._sources.popleft()
            if not self._sources:
                self._unread = 0
            return
        if self._unread is not None:
            self._unread -= attempts
        self._expect(task)
        group = AttemptGroup(f"{self._label}-{self._numbers}", task, self._occurrences[task.id], attempts)
        group.cancelled = self._numbers in self._unwanted
        self._read.append(group)
        self._numbers += 1
        self._occurrences[task.id] += 1

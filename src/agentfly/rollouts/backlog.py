"""Backlog: the rollouts of a batch that have not begun."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sized

from agentfly.rollouts.foresight import AHEAD
from agentfly.rollouts.group import Group
from agentfly.run_directory import whole_number
from agentfly.task import Row, Task, as_task


class Backlog:
    """Groups in the order in which they were added, read from where they come from only as far as needed.

    Args:
        label: begins the ids of the groups; their numbers follow.
        expect: told of each task some tasks before its turn comes.
        first: number of the first group.
    """

    def __init__(self, label: str, expect: Callable[[Task], None], first: int = 0) -> None:
        self._label = label
        self._expect = expect
        self._sources: deque[tuple[Iterator[Row], int]] = deque()
        self._read: deque[Group] = deque()
        self._numbers = first
        self._unwanted: set[int] = set()
        self._occurrences: Counter[str] = Counter()
        self._unread: int | None = 0

    @property
    def rollouts(self) -> int | None:
        """How many rollouts wait; None while that is not known, because an iterator has not been read to its end."""
        return None if self._unread is None else self._unread + sum(group.waiting for group in self._read)

    def add(self, tasks: Iterable[Row], attempts: int) -> None:
        """Add groups of so many attempts at each of the tasks."""
        size = len(tasks) if isinstance(tasks, Sized) else None
        self._sources.append((iter(tasks), attempts))
        if size is None:
            self._unread = None
        elif self._unread is not None:
            self._unread += size * attempts

    def group(self) -> Group | None:
        """The group whose next attempt comes next; None if nothing waits.

        Raises:
            ConfigError: what the iterator gives is no task, nor anything that one can be made of.
            Exception: what the iterator raises.
        """
        while True:
            while self._sources and len(self._read) <= AHEAD:
                self._read_one()
            if not self._read or self._read[0].waiting:
                break
            self._read.popleft()
        return self._read[0] if self._read else None

    def cancel(self, group_id: str) -> bool:
        """Have no further attempt of a group begin. False if no group of that name waits, or could come still."""
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
        """Forget everything that waits."""
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
        group = Group(f"{self._label}-{self._numbers}", task, self._occurrences[task.id], attempts)
        group.cancelled = self._numbers in self._unwanted
        self._read.append(group)
        self._numbers += 1
        self._occurrences[task.id] += 1

"""Crew: the tasks of a batch, which end when they are told to, in bounded time."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass
from typing import Any

from agentfly.rollouts.group import Group
from agentfly.trajectory import Trajectory

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds that rollouts have to end once they are cancelled. Those that take no notice are then left to themselves."""


@dataclass(eq=False, slots=True)
class Work:
    """What a task does: it runs a rollout, or scores a group.

    Attributes:
        group: whose it is.
        trajectory: what the rollout fills; None where the group is scored.
        begun: whether the task has. One that is cancelled before would not even notice, so it is not, and looks first
            whether there is still something to do.
        given_up: whether nobody waits for it any more.
    """

    group: Group
    trajectory: Trajectory | None = None
    begun: bool = False
    given_up: bool = False


class Crew:
    """Runs what is to be done for a batch, each in a task of its own.

    Args:
        give_up: called with each work that takes no notice of being cancelled; nobody waits for it any more.
    """

    def __init__(self, give_up: Callable[[Work], None]) -> None:
        self._give_up = give_up
        self._context = contextvars.copy_context()  # of whoever asks, and not of the rollout that makes room
        self._tasks: dict[asyncio.Task[None], Work] = {}

    def start(self, work: Work, doing: Coroutine[Any, Any, None]) -> None:
        """Have something done."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(doing, name=f"a rollout of {work.group.group_id}", context=self._context.copy())
        self._tasks[task] = work
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def groups(self) -> set[Group]:
        """The groups for which something is done."""
        return {work.group for work in self._tasks.values()}

    def cancel(self, group: Group | None = None) -> None:
        """Cancel what is done for a group, or everything."""
        for task, work in list(self._tasks.items()):
            if work.begun and (group is None or work.group is group):
                task.cancel()

    async def end(self, besides: Set[asyncio.Future[None]]) -> None:
        """Cancel everything and wait for its end, for `GRACE_S` at most, however often the waiter is cancelled.

        Args:
            besides: what else is to be waited for.
        """
        self.cancel()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE_S
        own = {asyncio.current_task()}  # a rollout may ask for the end of all
        cancelled: asyncio.CancelledError | None = None
        while (pending := {*self._tasks, *besides} - own) and loop.time() < deadline:
            try:
                await asyncio.wait(pending, timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
        self._leave_to_themselves(own)
        if cancelled is not None:
            raise cancelled

    def _leave_to_themselves(self, own: Set[asyncio.Task[Any] | None]) -> None:
        stubborn = [task for task in self._tasks if task not in own]
        if stubborn:
            logger.error(
                "%d rollouts take no notice of being cancelled and are left to themselves: a tool, a reward or a "
                "policy of theirs catches CancelledError and goes on.",
                len(stubborn),
            )
        for task in stubborn:
            work = self._tasks.pop(task)
            work.given_up = True
            self._give_up(work)

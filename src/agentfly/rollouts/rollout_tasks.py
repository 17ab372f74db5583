"""The asyncio tasks of a batch, which end in bounded time once cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Iterable, Set
from dataclasses import dataclass
from typing import Any

from agentfly.core.trajectory import Trajectory
from agentfly.rollouts.admission import AdmissionTicket
from agentfly.rollouts.backlog import AttemptGroup
from agentfly.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0
"""Seconds that rollouts have to end once they are cancelled. Those that take no notice are then left to themselves."""


@dataclass(eq=False, slots=True)
class RolloutTask:
    """What a task does: it runs a rollout, or scores a group.

    Attributes:
        group: whose it is.
        trajectory: what the rollout fills; None where the group is scored.
        rollout: the rollout, once it has begun.
        ticket: its place among those that run.
        begun: whether the task has. One that is cancelled before would not even notice, so it is not, and looks first
            whether there is still something to do.
        abandoned: whether nobody waits for it any more.
    """

    group: AttemptGroup
    trajectory: Trajectory | None = None
    rollout: Rollout | None = None
    ticket: AdmissionTicket | None = None
    begun: bool = False
    abandoned: bool = False


class RolloutTasks:
    """Runs what is to be done for a batch, each in a task of its own.

    Args:
        give_up: called with each work that takes no notice of being cancelled; nobody waits for it any more.
    """

    def __init__(self, give_up: Callable[[RolloutTask], None]) -> None:
        self._give_up = give_up
        self._context = contextvars.copy_context()  # of whoever asks, and not of the rollout that makes room
        self._tasks: dict[asyncio.Task[None], RolloutTask] = {}
        self._endings: set[asyncio.Task[None]] = set()  # of rollouts that were given up

    def start(self, work: RolloutTask, doing: Coroutine[Any, Any, None]) -> None:
        """Have something done."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(doing, name=f"a rollout of {work.group.group_id}", context=self._context.copy())
        self._tasks[task] = work
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def groups(self) -> set[AttemptGroup]:
        """The groups for which something is done."""
        return {work.group for work in self._tasks.values()}

    def cancel(self, group: AttemptGroup | None = None) -> None:
        """Cancel what is done for a group, or everything. What takes no notice for `CANCEL_GRACE_S` is given up."""
        cancelled = []
        for task, work in list(self._tasks.items()):
            if group is None or work.group is group:
                cancelled.append(task)
                if work.begun:
                    task.cancel()
        if cancelled:
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._abandon, cancelled)

    async def end(self, besides: Set[asyncio.Future[None]]) -> None:
        """Cancel everything and wait for its end, for `CANCEL_GRACE_S` at most, however often the waiter is cancelled.

        Args:
            besides: what else is to be waited for.
        """
        self.cancel()
        own = {asyncio.current_task()}  # a rollout may ask for the end of all
        cancelled = await _wait(lambda: {*self._tasks, *besides} - own)
        self._abandon([task for task in self._tasks if task not in own])
        cancelled = await _wait(lambda: {*self._endings}) or cancelled
        if cancelled is not None:
            raise cancelled

    def _abandon(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        stubborn = [task for task in tasks if task in self._tasks]
        if stubborn:
            logger.error(
                "%d rollouts take no notice of being cancelled and are left to themselves: a tool, a reward or a "
                "policy of theirs catches CancelledError and goes on. Let such code end, or raise the error again.",
                len(stubborn),
            )
        for task in stubborn:
            work = self._tasks.pop(task)
            work.abandoned = True
            _leave_out(task)
            if work.rollout is not None:
                ending = asyncio.create_task(work.rollout.abandon())
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
            if work.ticket is not None:
                work.ticket.release()
            self._give_up(work)


def _leave_out(task: asyncio.Task[None]) -> None:
    """Have the end of the event loop neither wait for a task nor complain about it."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def _wait(pending: Callable[[], Set[asyncio.Future[Any]]]) -> asyncio.CancelledError | None:
    """Wait until nothing is pending, for `CANCEL_GRACE_S` at most. If the waiter is cancelled, that is returned."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CANCEL_GRACE_S
    cancelled: asyncio.CancelledError | None = None
    while (those := pending()) and loop.time() < deadline:
        try:
            await asyncio.wait(those, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled

"""The asyncio tasks of a batch, which end within a time limit once they are cancelled."""

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
"""Seconds that rollouts have to end once they are cancelled. Those that do not end are then abandoned."""


@dataclass(eq=False, slots=True)
class RolloutTask:
    """The work of one asyncio task: running a rollout, or scoring a group.

    Attributes:
        group: the group that the work is for.
        trajectory: the trajectory of the rollout; None if the task scores the group.
        rollout: the rollout, once it has begun.
        ticket: the rollout's admission.
        begun: whether the task runs. asyncio would cancel an earlier task before its first line, so such a task is not
            cancelled, but checks first whether its work was cancelled.
        abandoned: whether the batch no longer waits for the task.
    """

    group: AttemptGroup
    trajectory: Trajectory | None = None
    rollout: Rollout | None = None
    ticket: AdmissionTicket | None = None
    begun: bool = False
    abandoned: bool = False


class RolloutTasks:
    """Runs the work of a batch, each piece in its own asyncio task.

    Args:
        give_up: called with each piece of work that is abandoned because it ignores its cancellation.
    """

    def __init__(self, give_up: Callable[[RolloutTask], None]) -> None:
        self._give_up = give_up
        self._context = contextvars.copy_context()  # the caller's, not that of the rollout whose end starts another
        self._tasks: dict[asyncio.Task[None], RolloutTask] = {}
        self._endings: set[asyncio.Task[None]] = set()  # release the resources of abandoned rollouts

    def start(self, work: RolloutTask, doing: Coroutine[Any, Any, None]) -> None:
        """Start ``doing`` in a new task."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(doing, name=f"a rollout of {work.group.group_id}", context=self._context.copy())
        self._tasks[task] = work
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def groups(self) -> set[AttemptGroup]:
        """Return the groups that tasks are running for."""
        return {work.group for work in self._tasks.values()}

    def cancel(self, group: AttemptGroup | None = None) -> None:
        """Cancel the tasks of a group, or all. Tasks that have not ended after `CANCEL_GRACE_S` are abandoned."""
        cancelled = []
        for task, work in list(self._tasks.items()):
            if group is None or work.group is group:
                cancelled.append(task)
                if work.begun:
                    task.cancel()
        if cancelled:
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._abandon, cancelled)

    async def end(self, besides: Set[asyncio.Future[None]]) -> None:
        """Cancel all tasks and wait at most `CANCEL_GRACE_S` for their end, even if the waiting task is cancelled.

        Args:
            besides: further futures to wait for.
        """
        self.cancel()
        own = {asyncio.current_task()}  # a rollout may call this itself
        cancelled = await _wait(lambda: {*self._tasks, *besides} - own)
        self._abandon([task for task in self._tasks if task not in own])
        cancelled = await _wait(lambda: {*self._endings}) or cancelled
        if cancelled is not None:
            raise cancelled

    def _abandon(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        stubborn = [task for task in tasks if task in self._tasks]
        if stubborn:
            logger.error(
                "%d rollouts ignore their cancellation and are abandoned: a tool, a reward or a policy catches "
                "CancelledError and continues. Let such code end, or raise the error again.",
                len(stubborn),
            )
        for task in stubborn:
            work = self._tasks.pop(task)
            work.abandoned = True
            _detach(task)
            if work.rollout is not None:
                ending = asyncio.create_task(work.rollout.abandon())
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
            if work.ticket is not None:
                work.ticket.release()
            self._give_up(work)


def _detach(task: asyncio.Task[None]) -> None:
    """Keep the end of the event loop from waiting for a task and from warning about it."""
    asyncio.tasks._unregister_task(task)  # documented, in "Extending asyncio"
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # there is no public way


async def _wait(pending: Callable[[], Set[asyncio.Future[Any]]]) -> asyncio.CancelledError | None:
    """Wait until nothing is pending, for `CANCEL_GRACE_S` at most. Return the waiter's own cancellation, if any."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CANCEL_GRACE_S
    cancelled: asyncio.CancelledError | None = None
    while (those := pending()) and loop.time() < deadline:
        try:
            await asyncio.wait(those, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled

"""Batch: requested rollouts, which begin when admitted and are delivered as they finish."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from agentfly.core.errors import UsageError
from agentfly.core.numbers import require_whole
from agentfly.core.signals import should_propagate
from agentfly.core.task import Tasks, tasks_to_read
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.rollouts.admission import Admission, AdmissionTicket
from agentfly.rollouts.backlog import AttemptGroup, Backlog
from agentfly.rollouts.failure_budget import FailureBudget
from agentfly.rollouts.rollout import Rollout
from agentfly.rollouts.rollout_record import RolloutStore
from agentfly.rollouts.rollout_tasks import RolloutTask, RolloutTasks
from agentfly.rollouts.scoring import ScoreGroup


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Numbers of rollouts of a batch by state.

    Attributes:
        waiting: not begun; None while unknown because the tasks come from an iterator.
        running: begun and not finished, or their group is being scored.
        ready: finished and not delivered yet.
        delivered: returned to the caller.
        cancelled: ended by a cancellation after they had begun.
    """

    waiting: int | None
    running: int
    ready: int
    delivered: int
    cancelled: int

    @property
    def unclaimed(self) -> int:
        """Number of rollouts that have begun and were not delivered."""
        return self.running + self.ready


class Batch:
    """Concurrent rollouts, delivered as they finish. More can be added at any time.

    Created by `Runner.batch`. Iteration delivers each trajectory once, and ends when all added rollouts are delivered:

    ``async with runner.batch(tasks, attempts=8) as batch: async for trajectory in batch: …``

    You can stop iterating at any time. Remaining rollouts keep running and are returned first by the next iteration.
    Call `cancel` to stop them. Leaving the block cancels unfinished rollouts and releases their resources.

    Args:
        make: creates the rollout that fills a trajectory. Its second argument is the rollout's admission ticket. Its
            third argument returns whether the rollout was cancelled.
        admission: decides when rollouts begin.
        backlog: the rollouts that have not begun.
        failure_budget: stops the batch after too many infrastructure failures.
        attempts: default number of rollouts per task.
        priority: rollouts of a higher priority begin, and get resources, first.
        record: stores finished rollouts, and finds those of an earlier run.
        score_group: scores groups. The trajectories of a group are then delivered together, once all have finished.
    """

    def __init__(
        self,
        make: Callable[[Trajectory, AdmissionTicket, Callable[[], bool]], Rollout],
        *,
        admission: Admission,
        backlog: Backlog,
        failure_budget: FailureBudget,
        attempts: int = 1,
        priority: int = 0,
        record: RolloutStore | None = None,
        score_group: ScoreGroup | None = None,
    ) -> None:
        self.priority = priority
        self._make = make
        self._admission = admission
        self._backlog = backlog
        self._failure_budget = failure_budget
        self._attempts = attempts
        self._record = record
        self._score_group = score_group
        self._rollout_tasks = RolloutTasks(self._give_up)
        self._groups: dict[str, AttemptGroup] = {}  # begun and not settled
        self._writes: set[asyncio.Future[None]] = set()
        self._ready: OrderedDict[str, Trajectory] = OrderedDict()
        self._complete: OrderedDict[str, AttemptGroup] = OrderedDict()  # settled; nothing of them was delivered alone
        self._begun = self._delivered = self._cancelled = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, tasks: Tasks, *, attempts: int | None = None) -> None:
        """Add rollouts, which begin after all that were added before.

        Args:
            tasks: see `agentfly.run`. An iterable that is not a list is read on the event loop, a few tasks ahead of
                the rollouts.
            attempts: number of rollouts per task; the default of the batch if not given.

        Raises:
            UsageError: the batch is closed.
            ConfigError: ``tasks`` holds something that is not a task and cannot be converted to one.
        """
        if self._closed:
            raise UsageError("This batch is closed. Create another one with runner.batch(…).")
        if attempts is not None:
            require_whole("batch.add", attempts=attempts)
        self._backlog.add(tasks_to_read(tasks), self._attempts if attempts is None else attempts)
        self._admission.enqueue(self)

    @property
    def closed(self) -> bool:
        """Whether the batch was closed."""
        return self._closed

    @property
    def progress(self) -> BatchProgress:
        """Current numbers of rollouts by state."""
        ready = len(self._ready)
        return BatchProgress(
            waiting=self._backlog.rollouts,
            running=self._begun - ready - self._delivered,
            ready=ready,
            delivered=self._delivered,
            cancelled=self._cancelled,
        )

    # --- results ------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        """Return the next finished trajectory.

        Raises:
            StopAsyncIteration: all added rollouts were delivered.
            FailureBudgetExceeded: too many rollouts, or all of them, failed for reasons of infrastructure. The others
                were cancelled.
            UsageError: the batch was closed during the wait.
        """
        while not self._ready:
            if not await self._more():
                raise StopAsyncIteration
        trajectory = next(iter(self._ready.values()))
        if group := self._complete.pop(trajectory.group_id, None) or self._groups.get(trajectory.group_id):
            group.partly_delivered = True
        return self._deliver(trajectory)

    async def groups(self) -> AsyncIterator[list[Trajectory]]:
        """Yield the trajectories of each group once all its attempts have finished, in the order of the attempts.

        Groups of which a trajectory was already delivered on its own are left out.

        Raises:
            FailureBudgetExceeded: see `__anext__`.
        """
        while self._complete or await self._more():
            if self._complete:
                yield self._deliver_group()

    async def take(self, groups: int, *, rest: Literal["keep", "cancel"] = "keep") -> list[Trajectory]:
        """Return the trajectories of the first ``groups`` groups to finish, or of all groups if there are fewer.

        Cancelled groups do not count, but their trajectories are returned, too.

        Args:
            groups: number of groups.
            rest: ``keep`` lets the other groups run for the next call. ``cancel`` ends them, and the result then holds
                all rollouts that had begun, with `FinishReason.CANCELLED` for those that had not finished.

        Raises:
            FailureBudgetExceeded: see `__anext__`. Finished trajectories can still be iterated over.
        """
        while sum(group.complete for group in self._complete.values()) < groups and await self._more():
            pass
        if rest == "cancel":
            await self.cancel()
        taken: list[Trajectory] = []
        while self._complete and (groups > 0 or rest == "cancel"):
            groups -= next(iter(self._complete.values())).complete
            taken += self._deliver_group()
        return taken

    async def _more(self) -> bool:
        """Wait until something has changed. Return False if nothing can change any more."""
        if self._error is not None:
            raise self._error
        if self._closed or not (self.progress.running or self._backlog.rollouts != 0):
            if error := self._failure_budget.error_if_all_failed():
                raise error
            return False
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise UsageError("This batch was closed, perhaps with its runner, during a wait for its trajectories.")
        return True

    def _deliver(self, trajectory: Trajectory) -> Trajectory:
        self._delivered += 1
        return self._ready.pop(trajectory.rollout_id)

    def _deliver_group(self) -> list[Trajectory]:
        _, group = self._complete.popitem(last=False)
        return [self._deliver(trajectory) for trajectory in group.by_attempt]

    # --- cancellation -------------------------------------------------------------------------------------------------

    def cancel_group(self, group_id: str) -> None:
        """Cancel a group: running attempts are cancelled, and no further attempt begins.

        Cancelled attempts are delivered like others, with `FinishReason.CANCELLED`, once their resources are released.

        Raises:
            UsageError: the group has no waiting or running attempt, and is not being scored.
        """
        groups = {group.group_id: group for group in (*self._groups.values(), *self._rollout_tasks.groups())}
        if group := groups.get(group_id):
            group.cancelled = True
            self._rollout_tasks.cancel(group)
            self._check_complete(group)
        elif not self._backlog.cancel(group_id):
            raise UsageError(f"This batch has no group {group_id!r} with a waiting or running attempt.")
        self._changed.set()

    async def cancel(self) -> None:
        """Cancel all unfinished rollouts, and return when their resources are released.

        Rollouts that had begun are delivered with `FinishReason.CANCELLED`; the others are discarded. More rollouts can
        be added afterwards.
        """
        self._backlog.clear()
        for group in {*self._groups.values(), *self._rollout_tasks.groups()}:
            group.cancelled = True
            self._check_complete(group)
        await self._rollout_tasks.end(self._writes)

    async def close(self) -> None:
        """Cancel all unfinished rollouts, deliver nothing more, and return when all resources are released."""
        self._closed = True
        self._admission.remove(self)
        self._backlog.clear()
        self._changed.set()
        await self._rollout_tasks.end(self._writes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- one rollout --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a rollout waits to begin, as far as is known."""
        return not self._over and self._backlog.rollouts != 0

    def begin_next(self, ticket: AdmissionTicket) -> bool:
        """Begin the next rollout. Rollouts that finished in an earlier run are not run again."""
        try:
            while not self._over and (group := self._backlog.next_group()) is not None:
                self._groups.setdefault(group.group_id, group)
                trajectory = group.begin()
                self._begun += 1
                finished = self._record.finished(group, trajectory.attempt) if self._record is not None else None
                if finished is None:
                    work = RolloutTask(group, trajectory, ticket=ticket)
                    self._rollout_tasks.start(work, self._run_rollout(work, trajectory, ticket))
                    return True
                group.scored += finished.scored
                self._ended(group, finished.trajectory)
        except Exception as error:  # from the tasks' iterator, or because the task differs from the recorded one
            self._fail(error)
        self._changed.set()
        return False

    @property
    def _over(self) -> bool:
        return self._closed or self._error is not None

    async def _run_rollout(self, work: RolloutTask, trajectory: Trajectory, ticket: AdmissionTicket) -> None:
        """Run a rollout to its end, whatever happens in it."""
        work.begun = True
        group, task = work.group, asyncio.current_task()
        try:
            if self._is_cancelled(group):
                raise asyncio.CancelledError
            work.rollout = self._make(trajectory, ticket, lambda: self._is_cancelled(group))
            await work.rollout.run()
        except BaseException as error:
            self._propagate(error, task)
            if isinstance(error, asyncio.CancelledError) and self._is_cancelled(group):
                trajectory.finish_reason, trajectory.reward = FinishReason.CANCELLED, None
            else:  # an error in the loop itself, or code in the rollout has cancelled its own task
                trajectory.finish_reason, trajectory.failure = FinishReason.FAILED, Failure.of(error)
        finally:
            ticket.release()
        if not self._over and not work.abandoned:
            self._record_then(group, [trajectory], lambda: self._ended(group, trajectory))

    def _is_cancelled(self, group: AttemptGroup) -> bool:
        """Return whether the work for a group was cancelled."""
        return group.cancelled or self._over

    def _propagate(self, error: BaseException, task: asyncio.Task[Any] | None) -> None:
        """Raise an error that ends the program. The batch has then failed."""
        if should_propagate(error, task):
            self._fail(error)
            raise error

    def _record_then(self, group: AttemptGroup, trajectories: Sequence[Trajectory], then: Callable[[], None]) -> None:
        """Record trajectories if there is a record, and then call ``then``."""
        if self._record is None:
            then()
            return
        scored = self._score_group is None or group.settled
        writing = asyncio.ensure_future(self._record.append(group, trajectories, scored=scored))
        self._writes.add(writing)

        def written(_: asyncio.Future[None]) -> None:
            self._writes.discard(writing)
            if error := writing.exception():
                self._fail(error)
            then()

        writing.add_done_callback(written)

    def _ended(self, group: AttemptGroup, trajectory: Trajectory) -> None:
        """Process a rollout that has ended and is recorded."""
        group.ended.append(trajectory)
        self._cancelled += trajectory.finish_reason is FinishReason.CANCELLED
        if self._score_group is None:
            self._make_ready(trajectory)
        self._check_complete(group)

    def _check_complete(self, group: AttemptGroup) -> None:
        """Score a group, or make it available, once it is settled."""
        if group.settled and self._groups.pop(group.group_id, None) is not None:
            if self._score_group is None or not group.complete or group.scored == group.attempts:
                self._scored(group)
            else:
                work = RolloutTask(group)
                self._rollout_tasks.start(work, self._score(self._score_group, work))
        self._changed.set()

    async def _score(self, score_group: ScoreGroup, work: RolloutTask) -> None:
        """Score a group. A failure leaves all its attempts unscored."""
        work.begun = True
        group, task = work.group, asyncio.current_task()
        try:
            if not self._is_cancelled(group):
                await score_group(group.by_attempt)
            if self._is_cancelled(group):  # also if the reward has caught the cancellation
                raise asyncio.CancelledError
        except BaseException as error:
            self._propagate(error, task)
            if group.cancelled and isinstance(error, asyncio.CancelledError):
                if not self._over and not work.abandoned:
                    self._give_up(work)  # on record, the attempts still wait for their score
                return
            group.mark_unscored(error)
        if not self._over and not work.abandoned:
            self._record_then(group, group.ended, lambda: self._scored(group))

    def _give_up(self, work: RolloutTask) -> None:
        """Replace the result of a rollout, or of the scoring of a group, that does not react to its cancellation."""
        if work.trajectory is None:
            self._cancelled += work.group.cancel_ended()
            self._scored(work.group)
        else:
            lost = work.trajectory
            cancelled = Trajectory(lost.rollout_id, lost.group_id, lost.task, lost.attempt)
            cancelled.finish_reason = FinishReason.CANCELLED
            self._ended(work.group, cancelled)

    def _scored(self, group: AttemptGroup) -> None:
        """Make a group available: nothing more will happen to it."""
        if self._score_group is not None:
            for trajectory in group.ended:
                self._make_ready(trajectory)
        if group.ended and not group.partly_delivered:
            self._complete[group.group_id] = group
        self._changed.set()

    def _make_ready(self, trajectory: Trajectory) -> None:
        self._ready[trajectory.rollout_id] = trajectory
        waiting = self._backlog.rollouts
        rollouts = None if waiting is None else waiting + self._begun
        if trajectory.finish_reason is not FinishReason.CANCELLED and (
            error := self._failure_budget.record(trajectory, rollouts=rollouts)
        ):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Cancel everything. The iteration raises the error after it has delivered what had finished."""
        if self._error is None:
            self._error = error
            self._backlog.clear()
            self._rollout_tasks.cancel()
            self._changed.set()

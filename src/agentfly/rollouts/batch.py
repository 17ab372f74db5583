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
    """How far a batch is, in numbers of rollouts.

    Attributes:
        waiting: have not begun; None while that is not known, because the tasks come from an iterator.
        running: have begun and not ended, or their group is being scored.
        ready: have ended and were not handed out yet.
        delivered: were handed out.
        cancelled: have ended because they were cancelled, after they had begun.
    """

    waiting: int | None
    running: int
    ready: int
    delivered: int
    cancelled: int

    @property
    def unclaimed(self) -> int:
        """Those that have begun and were not handed out: what there is beyond what was enough."""
        return self.running + self.ready


class Batch:
    """Rollouts that run side by side, and are handed out as they finish; more of them can be added at any time.

    Made by `Runner.batch`. Iterating hands out each trajectory once, and ends when nothing is left that was added:

    ``async with runner.batch(tasks, attempts=8) as batch: async for trajectory in batch: …``

    You can stop iterating at any time. Remaining rollouts keep running and are returned first by the next iteration.
    Call `cancel` to stop them. Leaving the block cancels unfinished rollouts and releases their resources.

    Args:
        make: makes the rollout that fills a trajectory, tells the guest of its waits for resources, and can ask
            whether it was cancelled.
        admission: lets the rollouts begin.
        backlog: holds those that have not begun.
        health: says when too many were spoiled.
        attempts: rollouts a task, if not said otherwise.
        priority: rollouts of a higher one begin, and get resources, first.
        record: where what has finished is written, and found again.
        score_group: scores groups. The trajectories of a group are then handed out together, once it is whole.
    """

    def __init__(
        self,
        make: Callable[[Trajectory, AdmissionTicket, Callable[[], bool]], Rollout],
        *,
        admission: Admission,
        backlog: Backlog,
        health: FailureBudget,
        attempts: int = 1,
        priority: int = 0,
        record: RolloutStore | None = None,
        score_group: ScoreGroup | None = None,
    ) -> None:
        self.priority = priority
        self._make = make
        self._admission = admission
        self._backlog = backlog
        self._health = health
        self._attempts = attempts
        self._record = record
        self._score_group = score_group
        self._rollout_tasks = RolloutTasks(self._give_up)
        self._groups: dict[str, AttemptGroup] = {}  # that have begun and are not whole
        self._writes: set[asyncio.Future[None]] = set()
        self._ready: OrderedDict[str, Trajectory] = OrderedDict()
        self._whole: OrderedDict[str, AttemptGroup] = OrderedDict()  # of which nothing was handed out alone
        self._begun = self._handed_out = self._cancelled = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    # --- what is asked for --------------------------------------------------------------------------------------------

    def add(self, tasks: Tasks, *, attempts: int | None = None) -> None:
        """Ask for more rollouts, which begin after those that were asked for before.

        Args:
            tasks: as of `agentfly.run`. An iterable that is no list is read, on the event loop, a few tasks ahead of
                what begins.
            attempts: rollouts a task; as the batch was made with if not given.

        Raises:
            UsageError: the batch is closed.
            ConfigError: there is no task in what is given for one.
        """
        if self._closed:
            raise UsageError("This batch is closed. Make another one with runner.batch(…).")
        if attempts is not None:
            require_whole("batch.add", attempts=attempts)
        self._backlog.add(tasks_to_read(tasks), self._attempts if attempts is None else attempts)
        self._admission.enqueue(self)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def progress(self) -> BatchProgress:
        """How far it is."""
        ready = len(self._ready)
        return BatchProgress(
            waiting=self._backlog.rollouts,
            running=self._begun - ready - self._handed_out,
            ready=ready,
            delivered=self._handed_out,
            cancelled=self._cancelled,
        )

    # --- what comes of it ---------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        """The next trajectory.

        Raises:
            StopAsyncIteration: all that was added was handed out.
            FailureBudgetExceeded: infrastructure has spoiled too many rollouts, or each of them. The rest was
                cancelled.
            UsageError: the batch was closed while this waited.
        """
        while not self._ready:
            if not await self._more():
                raise StopAsyncIteration
        trajectory = next(iter(self._ready.values()))
        if group := self._whole.pop(trajectory.group_id, None) or self._groups.get(trajectory.group_id):
            group.partly_delivered = True
        return self._hand_out(trajectory)

    async def groups(self) -> AsyncIterator[list[Trajectory]]:
        """The trajectories by groups, each as it becomes whole, in the order of the attempts.

        A group of which a trajectory was handed out alone before does not come again.

        Raises:
            FailureBudgetExceeded: as iterating.
        """
        while self._whole or await self._more():
            if self._whole:
                yield self._hand_out_group()

    async def take(self, groups: int, *, rest: Literal["keep", "cancel"] = "keep") -> list[Trajectory]:
        """The trajectories of as many groups as are enough, the first to become whole; of all if there are no more.

        A cancelled group does not count as one, and its trajectories are in the answer all the same.

        Args:
            groups: how many are enough.
            rest: what becomes of the others: ``keep`` lets them run on, for the next call; ``cancel`` ends them. The
                answer then holds all that had begun, with `FinishReason.CANCELLED` where it had not ended.

        Raises:
            FailureBudgetExceeded: as iterating. What has finished can still be iterated over.
        """
        while sum(group.complete for group in self._whole.values()) < groups and await self._more():
            pass
        if rest == "cancel":
            await self.cancel()
        taken: list[Trajectory] = []
        while self._whole and (groups > 0 or rest == "cancel"):
            groups -= next(iter(self._whole.values())).complete
            taken += self._hand_out_group()
        return taken

    async def _more(self) -> bool:
        """Wait until something has changed; False if nothing will."""
        if self._error is not None:
            raise self._error
        if self._closed or not (self.progress.running or self._backlog.rollouts != 0):
            if error := self._health.error_if_all_failed():
                raise error
            return False
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise UsageError("This batch was closed, perhaps with its runner, while its trajectories were waited for.")
        return True

    def _hand_out(self, trajectory: Trajectory) -> Trajectory:
        self._handed_out += 1
        return self._ready.pop(trajectory.rollout_id)

    def _hand_out_group(self) -> list[Trajectory]:
        _, group = self._whole.popitem(last=False)
        return [self._hand_out(trajectory) for trajectory in group.by_attempt]

    # --- how it ends --------------------------------------------------------------------------------------------------

    def cancel_group(self, group_id: str) -> None:
        """End the attempts of a group: none begins any more, and those that run are cancelled.

        They are handed out as the others, with `FinishReason.CANCELLED`, once their resources are given back.

        Raises:
            UsageError: no attempt of such a group waits or runs, and it is not being scored.
        """
        groups = {group.group_id: group for group in (*self._groups.values(), *self._rollout_tasks.groups())}
        if group := groups.get(group_id):
            group.cancelled = True
            self._rollout_tasks.cancel(group)
            self._check_complete(group)
        elif not self._backlog.cancel(group_id):
            raise UsageError(f"There is no group {group_id!r} in this batch of which an attempt waits or runs.")
        self._changed.set()

    async def cancel(self) -> None:
        """End all that has not ended; return when it has, its resources given back.

        What had begun is handed out with `FinishReason.CANCELLED`; what had not is forgotten. More can be added then.
        """
        self._backlog.clear()
        for group in {*self._groups.values(), *self._rollout_tasks.groups()}:
            group.cancelled = True
            self._check_complete(group)
        await self._rollout_tasks.end(self._writes)

    async def close(self) -> None:
        """End all that has not ended, hand nothing out any more, and return when everything is given back."""
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
        """Begin the next rollout; those that had finished in an earlier run are not run again."""
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
        except Exception as error:  # of the tasks' iterator, or of a task that is not the one recorded
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
            else:  # a fault of the loop itself, or something in the rollout has cancelled it from within
                trajectory.finish_reason, trajectory.failure = FinishReason.FAILED, Failure.of(error)
        finally:
            ticket.release()
        if not self._over and not work.abandoned:
            self._record_then(group, [trajectory], lambda: self._ended(group, trajectory))

    def _is_cancelled(self, group: AttemptGroup) -> bool:
        """Whether what is done for a group was cancelled."""
        return group.cancelled or self._over

    def _propagate(self, error: BaseException, task: asyncio.Task[Any] | None) -> None:
        """Raise what ends the program; nobody waits for this batch any more then."""
        if should_propagate(error, task):
            self._fail(error)
            raise error

    def _record_then(self, group: AttemptGroup, trajectories: Sequence[Trajectory], then: Callable[[], None]) -> None:
        """Have trajectories recorded if there is a record, and then go on."""
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
        """A rollout has ended, and is recorded."""
        group.ended.append(trajectory)
        self._cancelled += trajectory.finish_reason is FinishReason.CANCELLED
        if self._score_group is None:
            self._make_ready(trajectory)
        self._check_complete(group)

    def _check_complete(self, group: AttemptGroup) -> None:
        """Go on with a group if it has become whole."""
        if group.settled and self._groups.pop(group.group_id, None) is not None:
            if self._score_group is None or not group.complete or group.scored == group.attempts:
                self._scored(group)
            else:
                work = RolloutTask(group)
                self._rollout_tasks.start(work, self._score(self._score_group, work))
        self._changed.set()

    async def _score(self, score_group: ScoreGroup, work: RolloutTask) -> None:
        """Score a group. A failure leaves all of it unscored."""
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
                    self._give_up(work)  # on the record the attempts still wait for their score
                return
            group.mark_unscored(error)
        if not self._over and not work.abandoned:
            self._record_then(group, group.ended, lambda: self._scored(group))

    def _give_up(self, work: RolloutTask) -> None:
        """What a rollout, or the scoring of a group, that does not end may still do counts no more."""
        if work.trajectory is None:
            self._cancelled += work.group.cancel_ended()
            self._scored(work.group)
        else:
            lost = work.trajectory
            cancelled = Trajectory(lost.rollout_id, lost.group_id, lost.task, lost.attempt)
            cancelled.finish_reason = FinishReason.CANCELLED
            self._ended(work.group, cancelled)

    def _scored(self, group: AttemptGroup) -> None:
        """Nothing more will happen to a group."""
        if self._score_group is not None:
            for trajectory in group.ended:
                self._make_ready(trajectory)
        if group.ended and not group.partly_delivered:
            self._whole[group.group_id] = group
        self._changed.set()

    def _make_ready(self, trajectory: Trajectory) -> None:
        self._ready[trajectory.rollout_id] = trajectory
        waiting = self._backlog.rollouts
        rollouts = None if waiting is None else waiting + self._begun
        if trajectory.finish_reason is not FinishReason.CANCELLED and (
            error := self._health.record(trajectory, rollouts=rollouts)
        ):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop all that runs; whoever iterates gets the error after what was finished."""
        if self._error is None:
            self._error = error
            self._backlog.clear()
            self._rollout_tasks.cancel()
            self._changed.set()

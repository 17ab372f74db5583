"""InstanceController: carries out the scheduler's decisions about instances in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from agentfly.core.async_tasks import CANCEL_GRACE_S, cancel_and_wait, wait_uninterrupted
from agentfly.core.errors import ResourceDied, ResourceError, describe_error
from agentfly.core.events import (
    ResourceFailed,
    ResourceReset,
    ResourceStartBackoff,
    ResourceStarted,
    ResourceStartFailed,
    ResourceStarting,
    ResourceStopped,
    ResourceStuck,
)
from agentfly.resources.engine.instances import LiveInstances
from agentfly.resources.engine.preparation import EmitResourceEvent, Preparer
from agentfly.resources.resource import Status
from agentfly.resources.scheduler.decisions import BackOffStarts, Decision
from agentfly.resources.scheduler.scheduler import Scheduler
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_RETRY_S = (5.0, 300.0)
"""Initial and maximum seconds until the removal of a stuck instance is retried; doubled each time."""

MAX_LOGGED_REASONS = 8
"""Maximum number of logged reasons for replaced instances per pool."""

REMEMBERED = 1000
"""Number of pools whose logged reasons are remembered.

The number of pools is unbounded if each task has its own spec.
"""

WARN_INTERVAL_S = 600.0
"""Minimum seconds between two warnings about failing starts of a pool, or about a full disk."""

Spec = ResourceSpec[Any]


Operation = Callable[[], Coroutine[Any, Any, None]]
Report = Callable[[BaseException | None], None]
"""Called with None after success, and otherwise with the error."""


class BackgroundOperation:
    """A running start or reset.

    Args:
        operation: the coroutine function to run.
        limit_s: time limit in seconds. The operation is then cancelled, and abandoned if it ignores that.
        what: its name in messages.
        report: called exactly once, unless `cancel` comes first.
    """

    def __init__(self, operation: Operation, limit_s: float, what: str, report: Report) -> None:
        loop = asyncio.get_running_loop()
        self._operation = operation
        self._limit_s = limit_s
        self._what = what
        self._report: Report | None = report
        self._overdue: TimeoutError | None = None
        self._timer = loop.call_later(limit_s, self._expire)
        self.task = loop.create_task(self._run(), name=what)

    async def cancel(self) -> None:
        """Cancel it without a report; return when it has ended, or ignores the cancellation."""
        self._timer.cancel()
        self._report = None
        await cancel_and_wait(self.task)

    async def _run(self) -> None:
        try:
            await self._operation()
        except BaseException as error:
            self._report_once(self._overdue or error)
            if not isinstance(error, Exception) and self._overdue is None:
                raise
        else:
            self._report_once(None)

    def _report_once(self, error: BaseException | None) -> None:
        self._timer.cancel()
        report, self._report = self._report, None
        if report is not None:
            report(error)

    def _expire(self) -> None:
        self._overdue = TimeoutError(f"{self._what} took longer than its limit of {self._limit_s:g} s")
        self.task.cancel()
        self._timer = asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        logger.error("%s ignores its cancellation and is abandoned.", self._what)
        self._report_once(self._overdue)


class InstanceController:
    """Starts, resets, checks and stops instances concurrently.

    Args:
        scheduler: receives the outcomes.
        instances: the live resources.
        preparer: prepares the prerequisites of starts.
        execute: executes the decisions that the scheduler returns.
        emit: emits events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: LiveInstances,
        preparer: Preparer,
        execute: Callable[[list[Decision]], None],
        emit: EmitResourceEvent,
    ) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._preparer = preparer
        self._execute = execute
        self._emit = emit
        self._tasks: set[asyncio.Task[Any]] = set()
        self._works: set[asyncio.Task[Any]] = set()  # including those that ignore their cancellation
        self._operations: dict[str, BackgroundOperation] = {}  # by instance
        self._finishing = asyncio.Event()
        self._unremovable: set[str] = set()
        self._warned: dict[Spec, set[str]] = {}
        self._last_warned: dict[Spec | None, float] = {}  # time of the last warning; None stands for a full disk

    def start(self, name: str, spec: Spec) -> None:
        """Prepare what an instance needs, with its own time limit, and then start the instance."""
        try:
            prepared = self._preparer.is_prepared(spec)
        except Exception as error:  # raised by the kind's code
            self._not_started(name, spec, error)
            return
        if prepared:
            self._start_prepared(name, spec)
            return

        def report(error: BaseException | None) -> None:
            if error is None:
                self._start_prepared(name, spec)
            else:
                self._not_started(name, spec, error)

        limit = spec.prepare_timeout_s + 2 * CANCEL_GRACE_S  # the preparation itself ends earlier
        self._work(
            name, BackgroundOperation(partial(self._preparer.prepare, spec), limit, f"prepare() for {name}", report)
        )

    def _start_prepared(self, name: str, spec: Spec) -> None:
        began = _now()

        def report(error: BaseException | None) -> None:
            if error is None:
                self._operations.pop(name, None)
                self._emit(ResourceStarted, spec, instance=name, seconds=_now() - began)
                self._execute(self._scheduler.started(name, _now()))
            else:
                self._preparer.invalidate(spec)
                self._not_started(name, spec, error)

        self._emit(ResourceStarting, spec, instance=name)
        on_dead, check = partial(self.instance_died, name, spec), partial(self.check, name, spec)
        operation = partial(self._instances.start, name, spec, on_dead, check)
        self._work(name, BackgroundOperation(operation, spec.start_timeout_s, f"start() of {name}", report))

    def _not_started(self, name: str, spec: Spec, error: BaseException) -> None:
        self._operations.pop(name, None)
        self._emit(ResourceStartFailed, spec, instance=name, error=describe_error(error))
        self._execute(self._scheduler.start_failed(name, error, _now()))

    def starts_backed_off(self, pause: BackOffStarts) -> None:
        """Report that starts are backed off: always as an event, and rarely in the log."""
        cause = describe_error(pause.error)
        self._emit(ResourceStartBackoff, pause.spec, error=cause, seconds=pause.seconds, rounds=pause.rounds)
        what, now = None if pause.full_disk else pause.spec, _now()
        self._last_warned = {pool: then for pool, then in self._last_warned.items() if now - then < WARN_INTERVAL_S}
        if what in self._last_warned:
            return
        self._last_warned[what] = now
        if pause.full_disk:
            logger.warning(
                "%s cannot start because a disk is full. Starts and the requests for them wait until there is space. "
                "Free some space, or lower the capacity of the resources that fill the disk: %s",
                pause.spec.label,
                cause,
            )
        else:
            logger.warning(
                "%s does not start. The start is retried in %g s, and then at growing intervals while requests wait: "
                "%s",
                pause.spec.label,
                pause.seconds,
                cause,
            )

    def reset(self, name: str, spec: Spec) -> None:
        """Reset an instance and check its health."""
        began = _now()

        def report(error: BaseException | None) -> None:
            self._operations.pop(name, None)
            if error is None:
                self._emit(ResourceReset, spec, instance=name, seconds=_now() - began)
                self._execute(self._scheduler.reset_done(name, _now()))
            else:
                self._emit_broken(name, spec, error)
                self._execute(self._scheduler.reset_failed(name, _now()))

        operation = partial(self._instances.reset, name)
        self._work(name, BackgroundOperation(operation, spec.reset_timeout_s, f"reset() of {name}", report))

    def check(self, name: str, spec: Spec) -> asyncio.Task[Status]:
        """Check the health of an instance."""
        return self._spawn(self._check(name, spec), f"check {name}")

    def stop(self, name: str, spec: Spec) -> None:
        """Remove an instance in any state."""
        self._spawn(self._stop(name, spec, self._operations.pop(name, None)), f"stop {name}")

    async def join(self) -> None:
        """Wait until all operations have ended. The removal of stuck instances is tried once more."""
        self._finishing.set()
        await wait_uninterrupted(self._tasks)
        for name, spec in self._instances.specs.items():
            if name not in self._unremovable:  # an interrupt has ended the task that should have removed it
                self.stop(name, spec)
        await wait_uninterrupted(self._tasks)

    async def _check(self, name: str, spec: Spec) -> Status:
        if name not in self._instances:
            return Status.BROKEN
        try:
            await self._instances.check(name)
        except (ResourceDied, TimeoutError) as error:
            usage = self._instances.usage(name)
            if isinstance(error, TimeoutError) and usage is not None and usage.is_held:
                logger.warning("%s is in use and does not report its status: %s", name, error)
                return Status.HEALTHY
            self.instance_died(name, spec, error)
            return Status.BROKEN
        return Status.HEALTHY

    def instance_died(self, name: str, spec: Spec, error: Exception) -> None:
        """Report that an instance is broken."""
        decisions = self._scheduler.died(name, error, _now())
        if decisions:  # none if it is stopping or resetting, which reports the failure itself
            self._emit_broken(name, spec, error)
            self._execute(decisions)

    def _emit_broken(self, name: str, spec: Spec, error: BaseException) -> None:
        self._warn_of(name, spec, error)
        self._emit(ResourceFailed, spec, instance=name, error=describe_error(error))

    def _warn_of(self, name: str, spec: Spec, error: BaseException) -> None:
        """Log why an instance is replaced: each reason once per pool, and at most `MAX_LOGGED_REASONS` of them."""
        warned = self._warned.setdefault(spec, set())
        if len(self._warned) > REMEMBERED:
            del self._warned[next(iter(self._warned))]
        reason = describe_error(error).replace(name, "")
        if reason not in warned and len(warned) < MAX_LOGGED_REASONS:
            warned.add(reason)
            logger.warning(
                "%s is replaced (further replacements for the same reason are not reported): %s",
                name,
                describe_error(error),
            )

    async def _stop(self, name: str, spec: Spec, running: BackgroundOperation | None) -> None:
        """Remove an instance, with any number of attempts. Its capacity is free only once it is gone."""
        began, (pause, longest) = _now(), STUCK_RETRY_S
        try:
            if running is not None:
                await running.cancel()
            while True:
                last = self._finishing.is_set()
                if await self._try_to_remove(name, spec):
                    return
                if last:
                    self._unremovable.add(name)
                    return
                await self._sleep_unless_closing(pause)
                pause = min(2 * pause, longest)
        finally:
            if name not in self._instances:
                self._emit(ResourceStopped, spec, instance=name, seconds=_now() - began)
                self._execute(self._scheduler.stopped(name, _now()))

    async def _try_to_remove(self, name: str, spec: Spec) -> bool:
        try:
            await self._instances.remove(name)
        except ResourceError as error:
            logger.error(
                "%s. It still counts against the capacity, and the removal is retried at growing intervals.", error
            )
            self._emit(ResourceStuck, spec, instance=name, error=str(error))
            self._execute(self._scheduler.stuck(name, _now()))
            return False
        return True

    async def _sleep_unless_closing(self, seconds: float) -> None:
        """Sleep, or return early when the engine closes."""
        try:
            async with asyncio.timeout(seconds):
                await self._finishing.wait()
        except TimeoutError:
            pass

    def _work(self, name: str, work: BackgroundOperation) -> None:
        self._operations[name] = work
        self._works.add(work.task)
        work.task.add_done_callback(self._finished)

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._works.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The resource engine failed to %s.", task.get_name(), exc_info=error)


def _now() -> float:
    return asyncio.get_running_loop().time()

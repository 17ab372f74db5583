"""Lifecycle: calls the four methods of resources, each within its time, with the ledger always right."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from agentfly.errors import ResourceDied, ResourceError, ResourceResetError
from agentfly.events import (
    EventStream,
    ResourceBroke,
    ResourceReset,
    ResourceStarted,
    ResourceStartFailed,
    ResourceStarting,
    ResourceStopped,
    ResourceStuck,
)
from agentfly.resources import orphans
from agentfly.resources.ledger import Entry, Ledger
from agentfly.resources.registry import kind_of, load, make_resource
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""Seconds that a method of a resource has to end after it was cancelled. After that nobody waits for it."""


class Lifecycle:
    """The resources that are alive, by instance name.

    An instance is known from before its start until it is certainly gone.
    """

    def __init__(self, ledger: Ledger, events: EventStream | None) -> None:
        self._ledger = ledger
        self._events = events or EventStream()
        self._resources: dict[str, Resource] = {}
        self._syncing: asyncio.Future[None] | None = None
        self._unsynced = False

    def __contains__(self, instance: str) -> bool:
        return instance in self._resources

    def __getitem__(self, instance: str) -> Resource:
        return self._resources[instance]

    async def start(self, instance: str, spec: ResourceSpec[Any]) -> None:
        """Make a resource and start it.

        Raises:
            Exception: what the resource raises, or TimeoutError. It is to be removed then.
        """
        began = time.monotonic()
        self._events.emit(ResourceStarting(pool=spec.label, instance=instance))
        try:
            resource = make_resource(spec, instance)
            self._resources[instance] = resource
            self._write_down(resource)
            self._sync()
            await bounded(resource.start(), spec.start_timeout_s, f"start() of {instance}", "start_timeout_s")
            self._write_down(resource)
        except BaseException as error:
            self._events.emit(ResourceStartFailed(pool=spec.label, instance=instance, error=_say(error)))
            raise
        self._events.emit(
            ResourceStarted(pool=spec.label, instance=instance, seconds=time.monotonic() - began),
        )

    async def reset(self, instance: str) -> None:
        """Bring a resource back to the state after its start, and see that it is healthy.

        Raises:
            Exception: what the resource raises, ResourceResetError, or TimeoutError. It is to be removed then.
        """
        resource = self._resources[instance]
        label, limit = resource.spec.label, resource.spec.reset_timeout_s
        began = time.monotonic()
        try:
            await bounded(_reset_and_check(resource), limit, f"reset() of {instance}", "reset_timeout_s")
        except Exception as error:
            self._events.emit(ResourceBroke(pool=label, instance=instance, error=_say(error)))
            raise
        self._events.emit(ResourceReset(pool=label, instance=instance, seconds=time.monotonic() - began))

    async def check(self, instance: str) -> None:
        """See that a resource is healthy.

        Raises:
            ResourceDied: it is not.
            TimeoutError: it does not say.
        """
        resource = self._resources[instance]
        limit = resource.spec.reset_timeout_s
        try:
            status = await bounded(resource.status(), limit, f"status() of {instance}", "reset_timeout_s")
            told = f"it says that it is {status.value}"
        except TimeoutError:
            raise
        except Exception as error:
            status, told = Status.BROKEN, f"asked for its status, it raised {_say(error)}"
        if status is not Status.HEALTHY:
            self._events.emit(ResourceBroke(pool=resource.spec.label, instance=instance, error=told))
            raise ResourceDied(f"{instance} is broken: {told}.")

    async def remove(self, instance: str) -> None:
        """Free everything that belongs to a resource: by its own ``release``, called again if it fails, and
        failing that by its kind's ``reap``. A cancellation meanwhile costs a try and then goes on.

        Raises:
            ResourceError: it may still be there.
        """
        if (resource := self._resources.get(instance)) is None:
            return
        label, limit = resource.spec.label, 2 * resource.spec.release_timeout_s
        cancelled: asyncio.CancelledError | None = None
        failures: list[BaseException] = []
        began = time.monotonic()
        for removal in (resource.release, resource.release, partial(self._reap, resource)):
            try:
                await bounded(removal(), limit, f"release() of {instance}", "release_timeout_s, twice")
            except asyncio.CancelledError as error:
                cancelled = error
                failures.append(error)
            except Exception as error:
                logger.warning("%s was not released: %s", instance, _say(error))
                failures.append(error)
            else:
                self._ledger.gone(instance)
                del self._resources[instance]
                seconds = time.monotonic() - began
                self._events.emit(ResourceStopped(pool=label, instance=instance, seconds=seconds))
                break
        if instance in self._resources:
            told = "; ".join(map(_say, failures))
            self._events.emit(ResourceStuck(pool=label, instance=instance, error=told))
            raise ResourceError(f"{instance} could not be removed: {told}") from failures[0]
        if cancelled is not None:
            raise cancelled

    async def close(self) -> None:
        """Close the ledger."""
        while self._syncing is not None:
            await asyncio.wait({self._syncing})
            await asyncio.sleep(0)
        self._ledger.close()

    def _write_down(self, resource: Resource) -> None:
        kind = kind_of(resource.spec)
        entry = Entry(resource.instance, kind.name, kind.reap_address, resource.traces, time.time())
        self._ledger.write(entry)

    async def _reap(self, resource: Resource) -> None:
        """Remove a resource as an orphan of it would be removed."""
        address = kind_of(resource.spec).reap_address
        if address is None:
            raise ResourceError("its kind has no reap to remove it otherwise")
        await orphans.remove(load(address), resource.traces)

    def _sync(self) -> None:
        """Bring the ledger to the disk without waiting for it; starts at the same time share one sync."""
        self._unsynced = True
        if self._syncing is None:
            self._unsynced = False
            self._syncing = asyncio.get_running_loop().run_in_executor(None, self._ledger.sync)
            self._syncing.add_done_callback(self._synced)

    def _synced(self, _: asyncio.Future[None]) -> None:
        self._syncing = None
        if self._unsynced:
            self._sync()


async def _reset_and_check(resource: Resource) -> None:
    await resource.reset()
    if await resource.status() is not Status.HEALTHY:
        raise ResourceResetError(f"{resource.instance} is broken after its reset.")


async def bounded(work: Coroutine[Any, Any, T], seconds: float, what: str, setting: str) -> T:
    """Wait for ``work``, at most for a time, also if it takes no notice of being cancelled.

    Raises:
        TimeoutError: it took longer; it has been cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await abandon(task)
        raise
    if not task.done():
        await abandon(task)
        raise TimeoutError(f"{what} took longer than {seconds:g} s ({setting})")
    return task.result()


async def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, but not for ever."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        logger.error("%r takes no notice of being cancelled and is left to itself.", task)
        task.add_done_callback(_look_away)
    else:
        _look_away(task)


def _look_away(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody waits for it; marked as seen, so that it is not reported as forgotten


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def see_through(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until every task is done, those too that are added meanwhile, however often the waiter is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while pending := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled

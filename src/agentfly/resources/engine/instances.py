"""LiveInstances: calls the four lifecycle methods of resources and keeps the ledger up to date."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from agentfly.core.async_tasks import wait_at_most
from agentfly.core.errors import ResourceDied, ResourceError, ResourceResetError, UsageError, describe_error
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.resources.engine import orphans
from agentfly.resources.engine.status_socket import StatusSocket
from agentfly.resources.engine.usage import InstanceUsage, LeaseUsage, Occupancy
from agentfly.resources.kind import create_resource, freeze_not_supported, import_object, kind_of
from agentfly.resources.process.ledger import Ledger, LedgerEntry
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

SYNC_PATIENCE_S = 10.0
"""Seconds that closing waits for the disk. The ledger is no use to the living, so no longer than that."""


class LiveInstances:
    """The resources that are alive, by instance name.

    An instance is known from before its start until it is certainly gone.
    """

    def __init__(self, ledger: Ledger, window: StatusSocket, in_call: Callable[[str], bool]) -> None:
        """Begin with none.

        Args:
            ledger: where it is written down what is alive.
            window: is opened beside the ledger.
            in_call: whether an owner has a call under way.
        """
        self._ledger = ledger
        self._window = window
        self._in_call = in_call
        self._attendances: dict[str, InstanceUsage] = {}
        self._occupancy: dict[str, Occupancy] = {}  # of those that are gone, by their specs' labels
        self._resources: dict[str, Resource] = {}
        self._syncing: asyncio.Future[None] | None = None
        self._unsynced = False

    def __contains__(self, instance: str) -> bool:
        return instance in self._resources

    def __getitem__(self, instance: str) -> Resource:
        return self._resources[instance]

    @property
    def specs(self) -> dict[str, ResourceSpec[Any]]:
        """The spec of each instance."""
        return {name: resource.spec for name, resource in self._resources.items()}

    def usage(self, instance: str) -> InstanceUsage | None:
        """Who has and uses an instance; None if there is no such instance."""
        return self._attendances.get(instance)

    def begin_lease(self, instance: str, owner: str) -> LeaseUsage:
        """Somebody has leased an instance, and uses it by way of what is returned."""
        return self._attendances[instance].begin_lease(owner)

    def occupancy(self) -> dict[str, Occupancy]:
        """How much instances were of use, by the labels of their specs; those that are gone are counted too."""
        total = dict(self._occupancy)
        for name, attendance in self._attendances.items():
            label = self._resources[name].spec.label
            total[label] = total.get(label, Occupancy()) + attendance.occupancy
        return total

    async def start(
        self,
        instance: str,
        spec: ResourceSpec[Any],
        lost: Callable[[Exception], None],
        check: Callable[[], asyncio.Task[Status]],
    ) -> None:
        """Make a resource and start it.

        Args:
            instance: its name.
            spec: what it is.
            lost: called should it turn out later that it cannot be thawed.
            check: has it asked how it is.

        Raises:
            Exception: what the resource raises. It is to be removed then.
        """
        resource = create_resource(spec, instance)
        parks = spec.idle == "freeze"
        if parks and not resource.can_freeze:
            raise freeze_not_supported(spec)
        self._resources[instance] = resource
        self._attendances[instance] = attendance = InstanceUsage(
            resource, parks=parks, in_call=self._in_call, lost=lost, check=check
        )
        self._record(resource)
        self._sync()
        async with attendance:
            await _call_lifecycle_method(resource, "start")
        self._record(resource)

    async def reset(self, instance: str) -> None:
        """Bring a resource back to the state after its start, and see that it is healthy.

        Raises:
            Exception: what the resource raises, or ResourceResetError. It is to be removed then.
        """
        resource = self._resources[instance]
        async with self._attendances[instance]:
            await _call_lifecycle_method(resource, "reset")
            if (complaint := await _health_problem(resource)) is not None:
                raise ResourceResetError(f"{instance} is broken after its reset: {complaint}.")

    async def check(self, instance: str) -> None:
        """See that a resource is healthy.

        Raises:
            ResourceDied: it is not.
            TimeoutError: it does not say.
        """
        resource = self._resources[instance]
        limit = resource.spec.reset_timeout_s
        complaint = await wait_at_most(_health_problem(resource), limit, f"status() of {instance}")
        if complaint is not None:
            raise ResourceDied(f"{instance} is broken: {complaint}.")

    def quick_check(self, instance: str) -> ResourceDied | None:
        """What there is to say of an instance that can be seen to be gone, at once; None if it cannot."""
        try:
            status = self._resources[instance].quick_status()
        except Exception as error:  # of a kind's own code
            return ResourceDied(f"{instance} is broken: quick_status() raised {describe_error(error)}.")
        if status is Status.HEALTHY:
            return None
        return ResourceDied(f"{instance} had died by the time it was to be handed out.")

    async def remove(self, instance: str) -> None:
        """Free everything that belongs to a resource: by its own ``release``, called again if it fails, and
        failing that by its kind's ``reap``. A cancellation meanwhile costs a try and then goes on.

        Raises:
            ResourceError: it may still be there.
        """
        if (resource := self._resources.get(instance)) is None:
            return
        limit = 2 * resource.spec.release_timeout_s
        cancelled: asyncio.CancelledError | None = None
        failures: list[BaseException] = []
        release = partial(self._release, resource)
        for removal in (release, release, partial(self._reap, resource)):
            try:
                await wait_at_most(removal(), limit, f"release() of {instance}, given twice its release_timeout_s,")
            except asyncio.CancelledError as error:
                cancelled = error
                failures.append(error)
            except (Exception, KeyboardInterrupt) as error:  # the latter has interrupted the loop already
                logger.warning("%s was not released: %s", instance, describe_error(error))
                failures.append(error)
            else:
                self._forget(resource)
                break
        if instance in self._resources:
            told = "; ".join(map(describe_error, failures))
            raise ResourceError(f"{instance} could not be removed: {told}") from failures[0]
        if cancelled is not None:
            raise cancelled

    async def close(self) -> None:
        """Close window and ledger. The disk is waited for no longer than `SYNC_PATIENCE_S`."""
        self._window.close()
        self._unsynced = False
        if (syncing := self._syncing) is not None:
            await asyncio.wait({syncing}, timeout=SYNC_PATIENCE_S)
            syncing.cancel()
        self._ledger.close()

    def _record(self, resource: Resource) -> None:
        kind = kind_of(resource.spec)
        entry = LedgerEntry(resource.instance, kind.name, kind.reap_address, resource.traces, time.time())
        self._ledger.write(entry)
        if self._ledger.path is not None:
            self._window.open(self._ledger.path)

    async def _release(self, resource: Resource) -> None:
        await self._attendances[resource.instance].close(resource.spec.release_timeout_s)
        await _call_lifecycle_method(resource, "release")

    def _forget(self, resource: Resource) -> None:
        """A resource is gone."""
        instance, label = resource.instance, resource.spec.label
        self._ledger.remove(instance)
        del self._resources[instance]
        self._occupancy[label] = self._occupancy.get(label, Occupancy()) + self._attendances.pop(instance).occupancy

    async def _reap(self, resource: Resource) -> None:
        """Remove a resource as an orphan of it would be removed."""
        address, traces = kind_of(resource.spec).reap_address, resource.traces
        if address is None or not traces:
            raise ResourceError("its kind has no reap to remove it otherwise, or it left no traces to be found by")
        await orphans.run_reap(import_object(address), traces)

    def _sync(self) -> None:
        """Bring the ledger to the disk without waiting for it; starts at the same time share one sync."""
        self._unsynced = True
        if self._syncing is None:
            self._unsynced = False
            self._syncing = THREAD_POOL.start(self._ledger.sync)
            self._syncing.add_done_callback(self._synced)

    def _synced(self, _: asyncio.Future[None]) -> None:
        self._syncing = None
        if self._unsynced:
            self._sync()


async def _health_problem(resource: Resource) -> str | None:
    """What is wrong with a resource by its own account; None if nothing is."""
    try:
        status = await _call_lifecycle_method(resource, "status")
    except Exception as error:
        return f"asked for its status, it raised {describe_error(error)}"
    if not isinstance(status, Status):
        return f"its status() returned {status!r:.200}; return Status.HEALTHY or Status.BROKEN"
    return None if status is Status.HEALTHY else f"it says that it is {status.value}"


async def _call_lifecycle_method(resource: Resource, name: str) -> Any:
    """What a method of the contract returns.

    Raises:
        UsageError: it is no coroutine.
        Exception: what it raises.
    """
    work = getattr(resource, name)()
    if not inspect.isawaitable(work):
        kind = type(resource).__name__
        raise UsageError(f"{kind}.{name}() is no coroutine. Write `async def {name}(self)` in the class {kind}.")
    return await work

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
from agentfly.resources.kind import import_object
from agentfly.resources.process.ledger import Ledger, LedgerEntry
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec, create_resource, freeze_not_supported, kind_of

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 10.0
"""Seconds that closing waits for the ledger to reach the disk."""


class LiveInstances:
    """All live resources, by instance name.

    An instance is listed from before its start until it is certainly gone.
    """

    def __init__(self, ledger: Ledger, status_socket: StatusSocket, in_call: Callable[[str], bool]) -> None:
        """Create an empty collection.

        Args:
            ledger: records the live instances.
            status_socket: opened beside the ledger.
            in_call: whether an owner has a running call.
        """
        self._ledger = ledger
        self._status_socket = status_socket
        self._in_call = in_call
        self._usages: dict[str, InstanceUsage] = {}
        self._occupancy: dict[str, Occupancy] = {}  # of removed instances, by the labels of their specs
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
        """Return the usage of an instance; None if the instance does not exist."""
        return self._usages.get(instance)

    def begin_lease(self, instance: str, owner: str) -> LeaseUsage:
        """Begin a lease of an instance. Its uses go through the returned object."""
        return self._usages[instance].begin_lease(owner)

    def occupancy(self) -> dict[str, Occupancy]:
        """The occupancy of all instances, including removed ones, by the labels of their specs."""
        total = dict(self._occupancy)
        for name, usage in self._usages.items():
            label = self._resources[name].spec.label
            total[label] = total.get(label, Occupancy()) + usage.occupancy
        return total

    async def start(
        self,
        instance: str,
        spec: ResourceSpec[Any],
        on_dead: Callable[[Exception], None],
        check: Callable[[], asyncio.Task[Status]],
    ) -> None:
        """Create a resource and start it.

        Args:
            instance: its name.
            spec: its spec.
            on_dead: called if it cannot be thawed later.
            check: starts a health check of it.

        Raises:
            Exception: any exception of the resource, which must then be removed.
        """
        resource = create_resource(spec, instance)
        freeze_when_idle = spec.idle == "freeze"
        if freeze_when_idle and not resource.can_freeze:
            raise freeze_not_supported(spec)
        self._resources[instance] = resource
        self._usages[instance] = usage = InstanceUsage(
            resource, freeze_when_idle=freeze_when_idle, in_call=self._in_call, on_dead=on_dead, check=check
        )
        self._record(resource)
        self._sync()
        async with usage:
            await _call_lifecycle_method(resource, "start")
        self._record(resource)

    async def reset(self, instance: str) -> None:
        """Reset a resource and check its health.

        Raises:
            Exception: any exception of the resource, or ResourceResetError. It must then be removed.
        """
        resource = self._resources[instance]
        async with self._usages[instance]:
            await _call_lifecycle_method(resource, "reset")
            if (problem := await _health_problem(resource)) is not None:
                raise ResourceResetError(f"{instance} is broken after its reset: {problem}.")

    async def check(self, instance: str) -> None:
        """Check the health of a resource.

        Raises:
            ResourceDied: it is not healthy.
            TimeoutError: it does not answer in time.
        """
        resource = self._resources[instance]
        limit = resource.spec.reset_timeout_s
        problem = await wait_at_most(_health_problem(resource), limit, f"status() of {instance}")
        if problem is not None:
            raise ResourceDied(f"{instance} is broken: {problem}.")

    def quick_check(self, instance: str) -> ResourceDied | None:
        """Return the error of an instance that is visibly gone, without waiting; None if it is not."""
        try:
            status = self._resources[instance].quick_status()
        except Exception as error:  # from the code of the kind
            return ResourceDied(f"{instance} is broken: quick_status() raised {describe_error(error)}.")
        if status is Status.HEALTHY:
            return None
        return ResourceDied(f"{instance} had died before it was handed out.")

    async def remove(self, instance: str) -> None:
        """Remove a resource by its ``release``, called twice if it fails, and then by its kind's ``reap``.

        A cancellation counts as one failed attempt and is raised at the end.

        Raises:
            ResourceError: it may still exist.
        """
        if (resource := self._resources.get(instance)) is None:
            return
        limit = 2 * resource.spec.release_timeout_s
        cancelled: asyncio.CancelledError | None = None
        failures: list[BaseException] = []
        release = partial(self._release, resource)
        for removal in (release, release, partial(self._reap, resource)):
            try:
                await wait_at_most(
                    removal(), limit, f"release() of {instance}, with a limit of twice its release_timeout_s,"
                )
            except asyncio.CancelledError as error:
                cancelled = error
                failures.append(error)
            except (Exception, KeyboardInterrupt) as error:  # KeyboardInterrupt has interrupted the loop already
                logger.warning("%s was not released: %s", instance, describe_error(error))
                failures.append(error)
            else:
                self._forget(resource)
                break
        if instance in self._resources:
            causes = "; ".join(map(describe_error, failures))
            raise ResourceError(f"{instance} could not be removed: {causes}") from failures[0]
        if cancelled is not None:
            raise cancelled

    async def close(self) -> None:
        """Close the status socket and the ledger. Wait at most `SYNC_TIMEOUT_S` for the disk."""
        self._status_socket.close()
        self._unsynced = False
        if (syncing := self._syncing) is not None:
            await asyncio.wait({syncing}, timeout=SYNC_TIMEOUT_S)
            syncing.cancel()
        self._ledger.close()

    def _record(self, resource: Resource) -> None:
        kind = kind_of(resource.spec)
        entry = LedgerEntry(resource.instance, kind.name, kind.reap_address, resource.traces, time.time())
        self._ledger.write(entry)
        if self._ledger.path is not None:
            self._status_socket.open(self._ledger.path)

    async def _release(self, resource: Resource) -> None:
        await self._usages[resource.instance].close(resource.spec.release_timeout_s)
        await _call_lifecycle_method(resource, "release")

    def _forget(self, resource: Resource) -> None:
        """Delete the entries of a removed resource."""
        instance, label = resource.instance, resource.spec.label
        self._ledger.remove(instance)
        del self._resources[instance]
        self._occupancy[label] = self._occupancy.get(label, Occupancy()) + self._usages.pop(instance).occupancy

    async def _reap(self, resource: Resource) -> None:
        """Remove a resource with the function that removes orphans of its kind."""
        address, traces = kind_of(resource.spec).reap_address, resource.traces
        if address is None or not traces:
            raise ResourceError("its kind has no reap function, or the instance has no traces")
        await orphans.run_reap(import_object(address), traces)

    def _sync(self) -> None:
        """Flush the ledger to disk in the background. Concurrent starts share one flush."""
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
    """Return the problem that a resource reports; None if it is healthy."""
    try:
        status = await _call_lifecycle_method(resource, "status")
    except Exception as error:
        return f"status() raised {describe_error(error)}"
    if not isinstance(status, Status):
        return f"its status() returned {status!r:.200}; return Status.HEALTHY or Status.BROKEN"
    return None if status is Status.HEALTHY else f"its status() is {status.value}"


async def _call_lifecycle_method(resource: Resource, name: str) -> Any:
    """Call a lifecycle method and return its result.

    Raises:
        UsageError: it is not a coroutine function.
        Exception: any exception that it raises.
    """
    work = getattr(resource, name)()
    if not inspect.isawaitable(work):
        kind = type(resource).__name__
        raise UsageError(f"{kind}.{name}() is not a coroutine. Write `async def {name}(self)` in the class {kind}.")
    return await work

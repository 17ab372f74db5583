"""Preparer: prepares what instances need before they can start, such as images, once per key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Protocol

from agentfly.core.async_tasks import CANCEL_GRACE_S, retrieve_exception, wait_at_most
from agentfly.core.errors import AgentFlyError, ResourceStartError, describe_error
from agentfly.core.events import ResourceEvent, ResourcePrepared, ResourcePreparing
from agentfly.resources.spec import ResourceSpec, kind_of, prepare, typed_key, validate_spec


class EmitResourceEvent(Protocol):
    """Emits an event about the pool of a spec."""

    def __call__(self, event: type[ResourceEvent], spec: ResourceSpec[Any], **fields: Any) -> None: ...


logger = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Number of finished preparations that are remembered. A forgotten one is repeated, which is quick."""

MAX_PREFETCHES = 2
"""Maximum number of concurrent prefetches."""

Spec = ResourceSpec[Any]


class Preparer:
    """Prepares for specs, once for each kind and ``preparation_key``.

    Args:
        emit: emits events.
    """

    def __init__(self, emit: EmitResourceEvent) -> None:
        self._emit = emit
        self._done: dict[Hashable, None] = {}
        self._under_way: dict[Hashable, asyncio.Task[None]] = {}
        self._expected: dict[Spec, Callable[[Spec], None]] = {}  # in order
        self._prefetching: set[asyncio.Task[None]] = set()
        self._stopped = False

    def is_prepared(self, spec: Spec) -> bool:
        """Whether a spec needs no preparation, or is prepared."""
        key = _key(spec)
        return key is None or key in self._done

    async def prepare(self, spec: Spec) -> None:
        """Prepare for a spec. Cancelling one waiter does not stop the preparation for the others.

        Raises:
            AgentFlyError: the preparation failed; the next request tries again.
        """
        if self.is_prepared(spec):
            return
        key = _key(spec)
        if (preparation := self._under_way.get(key)) is None:
            preparation = self._under_way[key] = self._spawn(self._prepare(spec, key), f"prepare {spec.label}")
        await asyncio.wait({preparation})
        if preparation.cancelled():
            raise ResourceStartError(
                f"The prerequisite of {spec.label} was not prepared, because the engine was closed."
            )
        preparation.result()

    def invalidate(self, spec: Spec) -> None:
        """Discard a preparation whose result may be gone, so that it is repeated."""
        self._done.pop(_key(spec), None)

    def prefetch(self, specs: Iterable[Spec], prepared: Callable[[Spec], None]) -> None:
        """Prepare for specs in the background, a few at once. ``prepared`` is called after each success."""
        for spec in () if self._stopped else specs:
            validate_spec(spec)
            self._expected[spec] = prepared
        for _ in range(min(MAX_PREFETCHES - len(self._prefetching), len(self._expected))):
            worker = self._spawn(self._prefetch(), "prefetch")
            self._prefetching.add(worker)
            worker.add_done_callback(self._prefetching.discard)

    def stop(self) -> None:
        """Cancel running preparations, and start no more."""
        self._stopped = True
        self._expected.clear()
        for task in (*self._prefetching, *self._under_way.values()):
            task.cancel()

    async def join(self) -> None:
        """After `stop`, wait until all preparations have ended or ignore their cancellation."""
        if tasks := {*self._prefetching, *self._under_way.values()}:
            _, ignoring = await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
            for task in ignoring:
                logger.error("%r ignores its cancellation and is abandoned.", task.get_name())

    async def _prepare(self, spec: Spec, key: Hashable) -> None:
        loop, what = asyncio.get_running_loop(), str(spec.preparation_key)
        began = loop.time()
        failure: BaseException | None = None
        self._emit(ResourcePreparing, spec, what=what)
        try:
            await wait_at_most(prepare(spec), spec.prepare_timeout_s, f"prepare() of {what}")
        except BaseException as error:
            failure = error
            if isinstance(error, AgentFlyError) or not isinstance(error, Exception):
                raise
            raise ResourceStartError(
                f"{what}, which {spec.label} needs, could not be prepared: {describe_error(error)}"
            ) from error
        else:
            self._done[key] = None
            if len(self._done) > REMEMBERED:
                del self._done[next(iter(self._done))]
        finally:
            del self._under_way[key]
            cause = None if failure is None else describe_error(failure)
            self._emit(ResourcePrepared, spec, what=what, seconds=loop.time() - began, error=cause)

    async def _prefetch(self) -> None:
        while self._expected:
            spec = next(iter(self._expected))
            prepared = self._expected.pop(spec)
            try:
                await self.prepare(spec)
            except Exception as error:
                logger.warning("%s; the next request tries again.", describe_error(error))
            else:
                prepared(spec)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(retrieve_exception)
        return task


def _key(spec: Spec) -> Hashable | None:
    own = spec.preparation_key
    return None if own is None else (kind_of(spec).name, typed_key(own))

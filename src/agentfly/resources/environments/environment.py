"""Environment: a live simulator, as tools call it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentfly.core.errors import ResourceDied, ResourceError, ResourceResetError, UsageError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.environments.hosts import EnvironmentHost, LoopHost, ThreadHost
from agentfly.resources.environments.process_host import ProcessHost
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process.cgroups import writable_cgroup_parent
from agentfly.resources.resource import Resource, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_START_WARNING_S = 10.0
"""Seconds after which it is logged that a start goes on."""

COSTLY_START_S = 2.0
"""Seconds that the making of a simulator may take without a word about how often that happens."""

ABANDONED_CALL_S = 1.0
"""Seconds that a release waits for a call that nobody waits for any more, so that the simulator can be closed."""


class Environment(Resource):
    """A live simulator. Every public method of the user's object can be awaited on it, wherever the object lives.

    ``await environment.step("north")`` calls ``step`` of the user's object. Its result or exception comes back
    unchanged. Calls of one environment run one at a time, in order, except in the loop, where async methods may
    overlap. A reset waits for its turn and never overlaps with a call.

    A cancelled call or reset runs to its end, and the next one waits for it, so a cancelled rollout does not lose the
    simulator. A call that exceeds ``call_timeout_s`` does lose it: the instance is replaced.

    A simulator that cannot recover, for instance because a program that it started has ended, raises
    `agentfly.core.errors.ResourceDied`. Its rollout then fails as infrastructure, and the instance is replaced.

    `call` reaches methods of the user's object that have the name of a method of this class.

    A simulator in a separate process can be frozen, with all processes that it started.
    """

    can_freeze: ClassVar[bool] = True  # if the spec allows it
    _warned_costly: ClassVar[set[str]] = set()  # kinds whose cost was logged

    spec: EnvironmentSpec

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        super().__init__(spec, instance)
        self._host = _create_host(spec, instance)
        self._resets_freely = False
        self._dead_reason: str | None = "it has not been started"
        self._recreating = False
        self._frozen = False
        self._lock = asyncio.Lock()  # held at the start of every operation on the simulator
        self._overlapping: set[asyncio.Task[Any]] = set()  # calls in the loop, which continue without the lock
        self._unfinished: set[asyncio.Task[Any]] = set()

    @classmethod
    async def prepare(cls, spec: EnvironmentSpec) -> None:
        """Find a parent for control groups, so that the ledger can name the control group of an instance."""
        await run_in_thread(writable_cgroup_parent)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def method(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            return self.call(name, *args, **kwargs)

        method.__name__ = name
        return method

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's object by name.

        Raises:
            UsageError: the object has no such public method, or an argument or the result cannot be sent to or
                from its process.
            ResourceDied: the simulator is gone, or the call took longer than ``call_timeout_s``.
        """
        return await self._finish_even_if_cancelled(self._call(method, args, kwargs), method)

    async def start(self) -> None:
        """Create the user's object, and reset it if possible. A slow start is logged at growing intervals."""
        async with self._lock:
            if self._dead_reason is None:
                raise UsageError(
                    f"{self.spec.label} {self.instance} is already started. Only the engine starts it. To call a "
                    "start() of the object itself, write call('start')."
                )
            began = asyncio.get_running_loop().time()
            with self._warn_while_slow():
                self._resets_freely = await self._host.start()
                if self._resets_freely:
                    await self._call_host("reset", (), {})
            self._dead_reason = None
            self._warn_cost(asyncio.get_running_loop().time() - began)

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Reset the simulator by its own ``reset``, and return the result; or create it again.

        Arguments are for the simulator's ``reset``: ``first = await environment.reset(seed=7)``. Without arguments, if
        there is no ``reset`` that takes none, the object is closed and created again.

        Raises:
            ResourceResetError: the simulator is lost.
            ResourceDied: the simulator died, or took longer than ``call_timeout_s`` for its reset or
                ``start_timeout_s`` for its creation.
        """
        return await self._finish_even_if_cancelled(self._reset(args, kwargs), "reset")

    async def status(self) -> Status:
        """Return whether the simulator can be used."""
        return Status.HEALTHY if self._why_lost() is None else Status.BROKEN

    def quick_status(self) -> Status:
        """Return whether the simulator is lost or its process has ended, as far as this is visible at once."""
        return Status.BROKEN if self._dead_reason is not None or self._host.peer_closed else Status.HEALTHY

    async def release(self) -> None:
        """End the simulator. Return when it is gone.

        Raises:
            ResourceError: it is not gone, because a call on a thread or in the loop does not end. `release` can be
                called again once the call has ended.
        """
        if self._frozen:
            await self.thaw()  # for its close()
        lost, self._dead_reason = self._why_lost(), "it was released"
        timeout_s = min(ABANDONED_CALL_S, self.spec.release_timeout_s / 4)
        settled = await self._wait_unfinished(timeout_s)
        for task in self._unfinished:
            task.cancel()
        async with self._lock:
            self._dead_reason = "it was released"  # also if a start has just ended
            await self._host.stop(within_s=self.spec.release_timeout_s, close=settled and lost is None)
        if not await self._wait_unfinished(timeout_s):
            calls = ", ".join(sorted(task.get_name() for task in self._unfinished))
            raise ResourceError(f"{self.spec.label} {self.instance} is not gone: {calls} ignores its cancellation.")

    async def freeze(self) -> None:
        """Stop the simulator's process, once an abandoned call has ended."""
        async with self._lock:
            self._frozen = True
            if isinstance(self._host, ProcessHost):
                self._host.freeze()

    async def thaw(self) -> None:
        """Continue the simulator's process."""
        self._frozen = False
        if isinstance(self._host, ProcessHost):
            self._host.thaw()

    @property
    def traces(self) -> dict[str, Any]:
        """The ids of its process, for `agentfly.resources.environments.worker_process.reap`."""
        return self._host.traces

    async def _finish_even_if_cancelled(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        """Run a coroutine to its end, even if its caller is cancelled."""
        task = asyncio.create_task(work, name=f"{self.instance}.{name}")
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise ResourceDied(f"{self.spec.label} {self.instance} was released during {name}().") from None
            raise

    async def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        async with self._lock:
            if (why := self._why_lost()) is not None:
                raise ResourceDied(f"{self.spec.label} {self.instance} cannot be used: {why}.")
            if self._host.one_call_at_a_time:
                return await self._call_host(method, args, kwargs)
            call = asyncio.current_task()
            assert call is not None  # created by `_finish_even_if_cancelled`
            self._overlapping.add(call)
        try:
            return await self._call_host(method, args, kwargs)
        finally:
            self._overlapping.discard(call)

    async def _reset(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        async with self._lock:
            if self._overlapping:
                await asyncio.wait(self._overlapping)
            if (why := self._why_lost()) is not None:
                raise ResourceResetError(f"{self.instance} cannot be reset: {why}.")
            if args or kwargs or self._resets_freely:
                return await self._call_host("reset", args, kwargs)
            return await self._recreate()

    async def _recreate(self) -> None:
        self._recreating = True
        try:
            await self._host.stop(within_s=self.spec.release_timeout_s, close=True)
            limit = self.spec.start_timeout_s
            with self._warn_while_slow():
                await self._with_deadline(
                    limit, self._host.start(), f"it was not created again within start_timeout_s={limit:g}"
                )
        except BaseException as error:
            self._dead_reason = self._dead_reason or f"creating it again failed with {error!r}"
            raise
        finally:
            self._recreating = False

    @contextlib.contextmanager
    def _warn_while_slow(self) -> Iterator[None]:
        """Log that a start is slow: after `SLOW_START_WARNING_S` seconds, and then at growing intervals."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def warn(so_far: float) -> None:
            nonlocal timer
            timer = loop.call_later(so_far, warn, 2 * so_far)
            logger.warning(
                "%s %s is still being created after %g s; the limit is start_timeout_s=%g.",
                self.spec.label,
                self.instance,
                so_far,
                self.spec.start_timeout_s,
            )

        timer = loop.call_later(SLOW_START_WARNING_S, warn, SLOW_START_WARNING_S)
        try:
            yield
        finally:
            timer.cancel()

    def _warn_cost(self, seconds: float) -> None:
        """Warn once if a simulator is costly to create and is created again for each owner, although it has a reset."""
        spec = self.spec
        if spec.reuse is not None or not (spec.is_single_use and self._resets_freely) or seconds < COSTLY_START_S:
            return
        if spec.label not in self._warned_costly:
            self._warned_costly.add(spec.label)
            logger.warning(
                "Each owner of %s gets a new process, and its creation took %.1f s. If its reset() leaves no data of "
                "the last owner behind, write reuse='reset'; or keep some instances ready with warm=….",
                spec.label,
                seconds,
            )

    async def _call_host(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        limit = self.spec.call_timeout_s
        call = self._host.call(method, args, kwargs)
        try:
            return await self._with_deadline(limit, call, self.spec.timeout_message(method))
        except ResourceDied as error:
            if self._host.dead_reason is None:  # raised by the simulator itself
                self._dead_reason = self._dead_reason or f"{method}() raised ResourceDied: {error}"
            raise

    async def _with_deadline(self, limit_s: float, work: Coroutine[Any, Any, T], otherwise: str) -> T:
        """Return the result of a coroutine. If it takes too long, the simulator is lost and is ended if possible."""
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():  # raised by the simulator itself
                raise
            self._dead_reason = otherwise
            with contextlib.suppress(ResourceError):  # `release` reports it
                await self._host.stop(within_s=0, close=False)
            raise ResourceDied(f"{self.spec.label} {self.instance} is lost: {otherwise}.") from None

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because the caller may be gone

    async def _wait_unfinished(self, timeout_s: float) -> bool:
        """Wait for abandoned calls. Return whether all of them have ended."""
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=timeout_s)
        return not self._unfinished

    def _why_lost(self) -> str | None:
        return self._dead_reason or (None if self._recreating else self._host.dead_reason)


def _create_host(spec: EnvironmentSpec, instance: str) -> EnvironmentHost:
    match spec.runs:
        case "loop":
            return LoopHost(spec)
        case "thread":
            return ThreadHost(spec, instance)
        case "process":
            return ProcessHost(spec, instance)

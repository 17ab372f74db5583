"""Context: the ids, task, trajectory so far and resources for a tool or reward."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from agentfly.contexts.rollout_state import RolloutCache, WaitTimer, waiting
from agentfly.core.errors import (
    AcquireTimeout,
    AgentFlyError,
    LeaseExpired,
    ResourceError,
    ResourceStartError,
    UnknownAttribute,
    UsageError,
    describe_error,
)
from agentfly.core.signals import should_propagate
from agentfly.core.task import Task
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.core.trajectory import Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.lease import Lease
from agentfly.resources.resource import Resource, Scope
from agentfly.resources.spec import ResourceSpec, validate_spec

R_co = TypeVar("R_co", covariant=True)

_ACQUIRE = (
    "Write `resource = await context.acquire(…)`, or in a sync tool `context.wait(context.acquire(…))`, for what is "
    "kept until the rollout ends; and `async with context.lease(…) as resource:` for the length of a block."
)


class AcquireCall(Coroutine[Any, Any, R_co]):
    """The coroutine that `Context.acquire` returns; to be awaited.

    If it is used as a context manager or as the resource itself, the error says what to write instead.

    Args:
        work: the coroutine itself.
    """

    def __init__(self, work: Coroutine[Any, Any, R_co]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, R_co]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Continue, as coroutines do."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Continue with an exception, as coroutines do."""
        return self._work.throw(*error)

    def close(self) -> None:
        """End, as coroutines do."""
        self._work.close()

    async def __aenter__(self) -> NoReturn:
        self._work.close()
        raise UsageError(f"`async with context.acquire(…)`: acquire() is no block. {_ACQUIRE}")

    async def __aexit__(self, *_: object) -> None:
        """Never called, but required by ``async with``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownAttribute(
            f"context.acquire(…).{name}: acquire() was not awaited, so this is no resource. {_ACQUIRE}"
        )


class LeaseBlock(AbstractAsyncContextManager[R_co]):
    """The context manager that `Context.lease` returns; to be entered with ``async with``.

    A use as a coroutine or resource raises an error that says what to write.

    Args:
        block: the block itself.
    """

    def __init__(self, block: AbstractAsyncContextManager[R_co]) -> None:
        self._block = block

    async def __aenter__(self) -> R_co:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)

    def __await__(self) -> NoReturn:
        raise UsageError(f"`await context.lease(…)`: lease() is a block. {_ACQUIRE}")

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownAttribute(f"context.lease(…).{name}: lease() was not entered, so this is no resource. {_ACQUIRE}")


R = TypeVar("R", bound=Resource)
T = TypeVar("T")

Prepare = Callable[[R, "Context"], Awaitable[object] | object]

WaitObserver = Callable[[tuple[ResourceSpec[Any], ...], Scope], AbstractContextManager[None]]
"""Called at every wait of a rollout for resources. Returns a context manager that is entered during the wait."""


def no_observer(_: tuple[ResourceSpec[Any], ...], __: Scope) -> AbstractContextManager[None]:
    """Observe nothing."""
    return nullcontext()


class Context:
    """The rollout's context, passed to every tool and reward with a parameter for it.

    It requests resources from the engine on behalf of its rollout and releases all of them when the rollout ends,
    however it ends. Tools need no code for allocation or clean-up.

    With ``ended=True`` the context is for scoring a rollout, or a group, after its own resources were released. Scope
    ``rollout`` is then refused, because the resource would not be in the state that the agent left.

    Attributes:
        rollout_id: id of the rollout; the owner of its leases begins with it.
        group_id: shared by all attempts at one task.
        attempt: number of the attempt in its group, from 0.
        task: the task; a field of it is ``context.task["name"]``. Each call gets a copy, so that changes do not reach
            other calls, other attempts or the record.
        trajectory: the rollout's record so far. Read-only.
        state: a dict that the tools of one rollout share. AgentFly does not read it.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: ResourceEngine,
        *,
        priority: int = 0,
        wait_observer: WaitObserver = no_observer,
        ended: bool = False,
    ) -> None:
        self.rollout_id = trajectory.rollout_id
        self.group_id = trajectory.group_id
        self.attempt = trajectory.attempt
        self.trajectory = trajectory
        self.state: dict[str, Any] = {}
        self._owner = f"{self.rollout_id}/{secrets.token_hex(3)}"  # two runs may name their rollouts alike
        self._engine = engine
        self._priority = priority
        self._wait_observer = wait_observer
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._rollout = RolloutState()
        self._waits = self._rollout_waits = WaitTimer(self._loop.time)
        self._call: CallScope | None = None
        self._task: Task | None = None

    @property
    def task(self) -> Task:
        """The task; see above."""
        if self._task is None:
            self._task = self.trajectory.task.copy()
        return self._task

    @property
    def waits(self) -> WaitTimer:
        """The waits for resources: of this call in the context of a call, else of the whole rollout."""
        return self._waits

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting that `waits` has counted so far. Simultaneous waits count once."""
        return self._waits.seconds

    def declare_resources(self, specs: Iterable[ResourceSpec[Any]]) -> None:
        """Declare the resources that the rollout needs with scope ``rollout``. The first acquire gets all of them."""
        self._rollout.declared = dict.fromkeys(specs)

    def acquire(
        self,
        spec: ResourceSpec[R],
        scope: Scope | str = Scope.ROLLOUT,
        *,
        timeout: float | None = None,
        prepare: Prepare[R] | None = None,
    ) -> AcquireCall[R]:
        """Return a live instance of ``spec``: the same one for every call of this rollout, held until the rollout ends.

        If the pool is full, the caller waits, while other rollouts and other calls continue. If the rollout's tools and
        reward declared resources (``@tool(resources=[…])``), the first acquire of one gets all of them together, and
        holds none of them while it waits.

        Args:
            spec: the resource's spec.
            scope: ``rollout`` for exclusive use until the rollout ends; ``call`` for exclusive use in this tool call;
                ``global`` for an instance shared with other rollouts.
            timeout: maximum wait in seconds, including the wait for another call that prepares the instance; None for
                no limit.
            prepare: called once with the fresh instance and this context, before any call of this rollout gets the
                instance: ``prepare(box, context)``. A sync function is called on the event loop and must not block. Not
                for scope ``global``.

        Raises:
            AcquireTimeout: nothing became free in time. The message lists the holders.
            ResourceError: the instance could not be started or prepared, or died; the wait was a deadlock; or the
                rollout, the call or the engine has ended.
            ConfigError: the spec exceeds the engine's whole budget, or asks for something that its kind does not offer.
            UsageError: the spec is invalid or of an unregistered kind; the scope is unknown, or is ``call`` outside a
                call; or ``prepare`` is given for a shared instance.
        """
        return AcquireCall(self._acquire(spec, scope, timeout, prepare))

    async def _acquire(
        self, spec: ResourceSpec[R], scope: Scope | str, timeout: float | None, prepare: Prepare[R] | None
    ) -> R:
        validate_spec(spec)
        scope = Scope(scope)
        call = self._call if scope is Scope.CALL else None
        if scope is Scope.CALL and call is None:
            raise UsageError(
                "acquire(…, scope='call') was used outside a tool call or reward, so there is no call to end it. "
                "Write `async with context.lease(spec) as resource:` instead."
            )
        if scope is Scope.ROLLOUT and self._ended:
            raise LeaseExpired(
                f"{spec.label} was asked for as the agent left it, but rollout {self.rollout_id} is over and has given "
                "it back. Group rewards, and rewards of stored trajectories, can have what is shared "
                "(scope='global') or new for this call (scope='call', context.lease(…)), and what the trajectory holds."
            )
        if scope is Scope.GLOBAL and prepare is not None:
            raise UsageError(
                f"acquire({spec.label}, scope='global', prepare=…): what all rollouts share is not prepared by one of "
                "them. Put what it needs into the spec, or acquire it with scope='rollout'."
            )
        asked = self._loop.time()
        left = timeout
        while True:
            if call is not None and call.ended:
                raise self._too_late()
            lease = await self._request(spec, scope, left, (self._call, asyncio.current_task()))
            deadline = None if timeout is None else asked + timeout
            if call is not None:
                call.leases.append(lease)
                if call.ended:  # in the meantime, so nothing else would end the lease
                    await self._engine.release(lease)
                    raise self._too_late()
            if prepare is None or await self._prepare_once(lease, prepare, deadline):
                return lease.resource
            left = None if deadline is None else max(0.0, deadline - self._loop.time())

    def lease(self, spec: ResourceSpec[R], *, timeout: float | None = None) -> LeaseBlock[R]:
        """Lease a separate instance of ``spec`` for the length of a block.

        ``async with context.lease(SANDBOX) as box:``

        Raises: the errors of `acquire`.
        """
        return LeaseBlock(self._lend(spec, timeout))

    @asynccontextmanager
    async def _lend(self, spec: ResourceSpec[R], timeout: float | None) -> AsyncIterator[R]:
        validate_spec(spec)
        lease = await self._request(spec, Scope.CALL, timeout, (asyncio.current_task(), self._call))
        try:
            yield lease.resource
        finally:
            await self._engine.release(lease)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the rollout's event loop and wait for it. For sync tools, which run on threads.

        ``box = context.wait(context.acquire(SANDBOX))``

        Raises:
            UsageError: it is not a coroutine, or this is the event loop's own thread.
        """
        if not isinstance(work, Coroutine):
            raise UsageError(
                f"context.wait({type(work).__name__}): it takes what an async method returned, for instance "
                "context.wait(context.acquire(SPEC)) or context.wait(box.run('ls'))."
            )
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            work.close()
            raise UsageError("context.wait() is for sync tools. In an async tool, write `await` instead.")
        if self._rollout.ended or (self._call is not None and self._call.ended):
            work.close()
            raise self._too_late()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        ending = self._rollout if self._call is None else self._call
        ending.works.add(future)
        future.add_done_callback(ending.works.discard)
        if ending.ended:  # it ended meanwhile, and may have missed this future
            future.cancel()
        with THREAD_POOL.not_counted_while_waiting():
            return future.result()

    async def cached(
        self,
        key: object,
        make: Callable[[Context], Coroutine[Any, Any, T]],
        close: Callable[[T], Awaitable[object]],
    ) -> T:
        """Return an object that the rollout keeps between its calls. It is created once and closed with the rollout.

        Args:
            key: identifies the object.
            make: creates it from the context of the whole rollout, because a call's context ends with the call.
            close: closes it within ten seconds, before the rollout's resources are released.

        Raises:
            ResourceError: the rollout has ended.
            Exception: any exception of ``make``.
        """
        whole = self._copy(_call=None)
        return await self._rollout.cache.get(key, lambda: make(whole), close)

    def call(self, *, observed: bool = True) -> AbstractAsyncContextManager[Context]:
        """Return the context for one call of a tool or reward.

        The end of the block ends the leases of scope ``call``, and the pending work of an abandoned sync tool.

        Args:
            observed: whether its waits for resources are observed. Those of a reward are not, because they do not
                predict the waits of a rollout that starts now.
        """
        call = CallScope()
        of_call = self._copy(_call=call, _wait_observer=self._wait_observer if observed else no_observer)
        return _CallContextManager(of_call, call, self._engine, self._owner)

    def timed_apart(self) -> Context:
        """Return a copy of this context with a separate `waits`, for one of several concurrent functions."""
        return self._copy()

    def _copy(self, **changed: object) -> Context:
        """Return a copy with some attributes changed, a separate `waits`, and its own copy of the task's fields."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, _task=None, _waits=WaitTimer(self._loop.time), **changed)
        return copied

    async def close(self) -> None:
        """Release everything that the rollout still holds. Called by the rollout layer when the rollout ends."""
        try:
            await self._rollout.cache.close()
        finally:
            self._rollout.ended = True
            for work in list(self._rollout.works):
                work.cancel()
            await self._engine.release_owner(self._owner)

    async def _request(
        self, spec: ResourceSpec[R], scope: Scope, timeout: float | None, callers: tuple[object, ...]
    ) -> Lease[R]:
        """Send a request to the engine on behalf of the call and its asyncio task, which both wait for the answer.

        A lease of scope ``call`` ends with the first of ``callers``. The task alone is not enough, because each `wait`
        of a sync tool, and `asyncio.wait_for`, runs in a new task.
        """
        if self._rollout.ended:
            raise ResourceError(
                f"{spec.label} was asked for by rollout {self.rollout_id}, which has ended. A tool that outlived its "
                "rollout may still be running; its work is not used."
            )
        declared = tuple(self._rollout.declared)
        if scope is Scope.GLOBAL and spec in declared:
            raise UsageError(
                f"{spec.label} was declared by a tool or reward (resources=…), which keeps an instance for the rollout "
                "alone, but is acquired with scope='global'. Take it out of resources=: what is shared is not declared."
            )
        together = scope is Scope.ROLLOUT and spec in declared and not self._rollout.has_declared
        wanted = declared if together else (spec,)
        with waiting(self._waits, self._rollout_waits), self._wait_observer(wanted, scope):
            if together:
                leases = await self._engine.acquire_all(
                    wanted, self._owner, timeout=timeout, priority=self._priority, callers=callers
                )
                self._rollout.has_declared = True
                return leases[wanted.index(spec)]
            return await self._engine.acquire(
                spec, self._owner, scope=scope, timeout=timeout, priority=self._priority, callers=callers
            )

    async def _prepare_once(self, lease: Lease[R], prepare: Prepare[R], deadline: float | None) -> bool:
        """Prepare the leased instance, unless that is done. A failed preparation ends the lease.

        Return False if this call waited for another call's preparation, and that failed: the lease has ended.

        Raises:
            AcquireTimeout: another call was still preparing the instance at the deadline.
        """
        preparation, task = self._rollout.preparations.setdefault(lease.id, PrepareOnce()), asyncio.current_task()
        try:
            with waiting(self._waits, self._rollout_waits):
                async with asyncio.timeout_at(deadline) as limit:
                    await preparation.turn.acquire()
        except TimeoutError:
            if not limit.expired():
                raise
            raise AcquireTimeout(
                f"{lease.spec.label} {lease.instance} was not ready in time: another call of rollout "
                f"{self.rollout_id} still prepares it. Give acquire() a longer timeout, or prepare less."
            ) from None
        try:
            if preparation.done or preparation.failed:
                return preparation.done
            asked = 0 if task is None else task.cancelling()
            try:
                result = prepare(lease.resource, self)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                preparation.failed = True
                await self._engine.release(lease)
                cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > asked)
                if isinstance(error, AgentFlyError) or cancelled or should_propagate(error, task):
                    raise
                raise ResourceStartError(
                    f"Preparing {lease.spec.label} {lease.instance} for rollout {self.rollout_id} failed with "
                    f"{describe_error(error)}. The instance was given back; mend the function passed as "
                    "prepare."
                ) from error
            preparation.done = True
            return True
        finally:
            preparation.turn.release()

    def _too_late(self) -> ResourceError:
        return ResourceError(f"A tool of rollout {self.rollout_id} outlived its call and can do nothing more.")


class CallScope:
    """One call of a tool or reward, with its leases and the work that its thread waits for."""

    def __init__(self) -> None:
        self.leases: list[Lease[Any]] = []
        self.works: set[concurrent.futures.Future[Any]] = set()
        self.ended = False


class _CallContextManager:
    """The context manager of one call."""

    __slots__ = ("_call", "_calling", "_context", "_engine")

    def __init__(self, context: Context, call: CallScope, engine: ResourceEngine, owner: str) -> None:
        self._context = context
        self._call = call
        self._engine = engine
        self._calling = engine.active_call(owner)

    async def __aenter__(self) -> Context:
        self._calling.__enter__()
        return self._context

    async def __aexit__(self, *_: object) -> None:
        call = self._call
        call.ended = True
        try:
            for work in list(call.works):
                work.cancel()
            for lease in call.leases:
                await self._engine.release(lease)
        finally:
            self._calling.__exit__()


class PrepareOnce:
    """State of a lease's preparation, with the lock that serialises it."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.done = False
        self.failed = False


class RolloutState:
    """State shared by all contexts of one rollout, including those of single calls."""

    def __init__(self) -> None:
        self.preparations: dict[int, PrepareOnce] = {}
        self.declared: dict[ResourceSpec[Any], None] = {}
        self.has_declared = False
        self.cache = RolloutCache()
        self.works: set[concurrent.futures.Future[Any]] = set()
        self.ended = False

"""EnvironmentHost: where a simulator runs; the event loop and the dedicated thread are implemented here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from agentfly.core.errors import ResourceError
from agentfly.resources.environments import simulator
from agentfly.resources.environments.spec import EnvironmentSpec


class EnvironmentHost(Protocol):
    """Creates a simulator, calls it and ends it.

    An `Environment` owns one. It gives every call a deadline and, with ``one_call_at_a_time``, makes one call at a
    time. Only a deadline or a release cancels a running start or call. After that only `stop` is called.

    An awaitable result of the simulator is awaited. A call of ``sys.exit`` in it becomes an ordinary error
    (`agentfly.resources.environments.simulator.as_exception`), and ends neither the simulator nor its host.
    """

    one_call_at_a_time: bool
    """Whether one call must have ended before the next begins."""

    async def start(self) -> bool:
        """Create the simulator. Return whether it has a ``reset`` that can be called without arguments."""
        ...

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the simulator. Return its result, or raise its exception.

        Raises:
            ResourceDied: the thread or process of the simulator has ended.
        """
        ...

    async def stop(self, *, within_s: float, close: bool) -> None:
        """End the simulator. Return when it is gone. Safe to call twice and after any failure.

        Args:
            within_s: seconds until it is forced to end.
            close: whether to call its own ``close``; False if its state does not allow calls.

        Raises:
            ResourceError: it is not gone, and cannot be ended.
        """
        ...

    @property
    def dead_reason(self) -> str | None:
        """Why the host can no longer be used; None while it can."""
        ...

    @property
    def peer_closed(self) -> bool:
        """Whether the thread or process has visibly ended, perhaps before `dead_reason` is known."""
        ...

    @property
    def traces(self) -> dict[str, Any]:
        """Data with which another process finds what outlives this process."""
        ...


logger = logging.getLogger(__name__)


class LoopHost:
    """Calls the simulator directly. Sync methods run to their end at once; async ones may overlap."""

    one_call_at_a_time = False

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._simulator: Any = None

    async def start(self) -> bool:
        spec = self._spec
        self._simulator = await _do(lambda: simulator.make(spec.factory, spec.args, spec.keywords))
        simulator.require_made(self._simulator, spec.factory)
        simulator.require_thread_safe(self._simulator, spec.label)
        return simulator.has_argless_reset(self._simulator)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await _do(lambda: simulator.call(self._simulator, method, args, kwargs))

    async def stop(self, *, within_s: float, close: bool) -> None:
        ending, self._simulator = self._simulator, None
        if close and hasattr(ending, "close"):
            try:
                async with asyncio.timeout(within_s):
                    await _do(ending.close)
            except Exception:
                logger.warning("Closing an environment failed; it is dropped: %s", self._spec.label, exc_info=True)

    @property
    def dead_reason(self) -> str | None:
        return None

    @property
    def peer_closed(self) -> bool:
        return False

    @property
    def traces(self) -> dict[str, Any]:
        return {}


async def _do(work: Callable[[], Any]) -> Any:
    """Run the user's code and return its result. Convert a `BaseException`, such as an exit, to an `Exception`."""
    try:
        result = work()
        return await result if isinstance(result, Awaitable) else result
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise simulator.as_exception(error) from error


ThreadJob = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class ThreadHost:
    """Sends calls to one dedicated daemon thread, for objects that are bound to a thread (SQLite, some simulators).

    The thread belongs to no pool. A hanging call blocks its thread, but not the end of the interpreter. A thread cannot
    be ended from outside, so the simulator is gone only when its calls have returned.
    """

    one_call_at_a_time = True

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        self._spec = spec
        self._instance = instance
        self._simulator: Any = None
        self._jobs: SimpleQueue[ThreadJob | None] | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> bool:
        self._jobs = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._instance, daemon=True)
        self._thread.start()
        return bool(await self._do(self._make))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._do(lambda: simulator.call(self._simulator, method, args, kwargs))

    async def stop(self, *, within_s: float, close: bool) -> None:
        self._request_end()
        if (thread := self._thread) is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while thread.is_alive():  # noqa: ASYNC110  (a thread's end wakes no loop)
                    await asyncio.sleep(0.001)
        if thread.is_alive():
            raise ResourceError(
                f"The thread of {self._spec.label} {self._instance} does not end: a call hangs in it, and threads "
                "cannot "
                'be ended from outside. It counts until the call returns. Use runs="process" for code that may hang.'
            )
        self._thread = None

    @property
    def dead_reason(self) -> str | None:
        return None

    @property
    def peer_closed(self) -> bool:
        return False

    @property
    def traces(self) -> dict[str, Any]:
        return {}

    async def _do(self, work: Callable[[], Any]) -> Any:
        assert self._jobs is not None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((work, loop, done))
        return await done

    def _make(self) -> Any:
        made = simulator.make(self._spec.factory, self._spec.args, self._spec.keywords)
        return self._keep_when_awaited(made) if isinstance(made, Awaitable) else self._keep(made)

    async def _keep_when_awaited(self, made: Awaitable[Any]) -> bool:
        return self._keep(await made)

    def _keep(self, made: Any) -> bool:
        simulator.require_made(made, self._spec.factory)
        simulator.require_thread_safe(made, self._spec.label)
        self._simulator = made
        return simulator.has_argless_reset(made)

    def _request_end(self) -> None:
        """Ask the thread to close the simulator and end once its calls have returned."""
        if self._jobs is not None:
            loop = asyncio.get_running_loop()
            closed: asyncio.Future[Any] = loop.create_future()
            closed.add_done_callback(self._closed)
            self._jobs.put((self._close, loop, closed))
            self._jobs.put(None)
            self._jobs = None

    def _close(self) -> Any:
        ending, self._simulator = self._simulator, None
        return ending.close() if hasattr(ending, "close") else None

    def _closed(self, closed: asyncio.Future[Any]) -> None:
        if not closed.cancelled() and (error := closed.exception()) is not None:
            logger.warning("Closing an environment failed; it is dropped: %s", self._spec.label, exc_info=error)


def _work(jobs: SimpleQueue[ThreadJob | None]) -> None:
    """Do the jobs of one simulator, in order, until None arrives."""
    with contextlib.closing(asyncio.Runner()) as runner:  # takes descriptors only when it first runs something
        while (job := jobs.get()) is not None:
            work, loop, done = job
            try:
                result = work()
                if isinstance(result, Awaitable):
                    result = runner.run(simulator.as_coroutine(result))
            except BaseException as error:
                _set_result(loop, done, done.set_exception, simulator.as_exception(error))
            else:
                _set_result(loop, done, done.set_result, result)


def _set_result(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], answer: Callable[[Any], None], value: Any
) -> None:
    def settle() -> None:
        if not done.done():  # its deadline may have passed
            answer(value)

    with contextlib.suppress(RuntimeError):  # the loop was closed while the call ran
        loop.call_soon_threadsafe(settle)

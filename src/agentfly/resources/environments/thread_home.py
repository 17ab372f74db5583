"""ThreadHome: the simulator lives on a thread of its own, from its making to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from agentfly.errors import ResourceError
from agentfly.resources.environments import simulator
from agentfly.resources.environments.spec import EnvironmentSpec

logger = logging.getLogger(__name__)

Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class ThreadHome:
    """Sends calls to one daemon thread, so that what is bound to a thread (SQLite, some simulators) stays on its own.

    The thread is a daemon and no pool's member: a call that hangs can keep its thread, but not the interpreter. A
    thread cannot be ended from outside, so the simulator is gone when its calls have come back, and not before.
    """

    serial = True

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        self._spec = spec
        self._instance = instance
        self._simulator: Any = None
        self._jobs: SimpleQueue[Job | None] | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> bool:
        self._jobs = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._instance, daemon=True)
        self._thread.start()
        return bool(await self._do(self._make))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._do(lambda: simulator.call(self._simulator, method, args, kwargs))

    async def stop(self, *, within_s: float, close: bool) -> None:
        self._tell_to_end()
        if (thread := self._thread) is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while thread.is_alive():  # noqa: ASYNC110  (a thread's end wakes no loop)
                    await asyncio.sleep(0.001)
        if thread.is_alive():
            raise ResourceError(
                f"The thread of {self._spec.label} {self._instance} does not end: a call hangs in it, and no thread "
                'can be ended from outside. It counts until the call returns. Give what may hang runs="process".'
            )
        self._thread = None

    @property
    def death(self) -> str | None:
        return None

    @property
    def has_hung_up(self) -> bool:
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
        return self._keep_when_made(made) if isinstance(made, Awaitable) else self._keep(made)

    async def _keep_when_made(self, made: Awaitable[Any]) -> bool:
        return self._keep(await made)

    def _keep(self, made: Any) -> bool:
        simulator.require_made(made, self._spec.factory)
        simulator.require_thread_safe(made, self._spec.label)
        self._simulator = made
        return simulator.resets_freely(made)

    def _tell_to_end(self) -> None:
        """Have the thread close the simulator, whenever it comes to that, and end."""
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


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """Do the jobs of one simulator, in order, until None comes."""
    with contextlib.closing(asyncio.Runner()) as runner:  # which takes descriptors only if there is something to run
        while (job := jobs.get()) is not None:
            work, loop, done = job
            try:
                result = work()
                if isinstance(result, Awaitable):
                    result = runner.run(simulator.outcome(result))
            except BaseException as error:
                _answer(loop, done, done.set_exception, simulator.as_exception(error))
            else:
                _answer(loop, done, done.set_result, result)


def _answer(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], answer: Callable[[Any], None], value: Any
) -> None:
    def settle() -> None:
        if not done.done():  # its deadline may have passed
            answer(value)

    with contextlib.suppress(RuntimeError):  # the loop was closed while the call ran
        loop.call_soon_threadsafe(settle)

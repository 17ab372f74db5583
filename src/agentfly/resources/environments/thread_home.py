"""ThreadHome: the simulator lives on a thread of its own, from its making to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from agentfly.resources.environments import simulator
from agentfly.resources.environments.spec import EnvironmentSpec

logger = logging.getLogger(__name__)

Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class ThreadHome:
    """Sends calls to one daemon thread, so that what is bound to a thread (SQLite, some simulators) stays on its own.

    The thread is a daemon and no pool's member: a call that hangs can keep its thread, but not the interpreter.
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

    async def stop(self, *, close_s: float) -> None:
        jobs, self._jobs = self._jobs, None
        thread, self._thread = self._thread, None
        if jobs is None or thread is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        jobs.put((self._close, asyncio.get_running_loop(), ended))
        jobs.put(None)
        try:
            async with asyncio.timeout(close_s or 0.1):  # the thread closes it, whenever it comes back
                await ended
        except TimeoutError:
            logger.warning("The thread of %s does not answer and is left to itself.", self._instance)
        except Exception:
            logger.warning("Closing an environment failed; it is dropped: %s", self._spec.label, exc_info=True)

    @property
    def death(self) -> str | None:
        return None

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
        if asyncio.iscoroutine(made):
            return self._keep_when_made(made)
        return self._keep(made)

    async def _keep_when_made(self, made: Any) -> bool:
        return self._keep(await made)

    def _keep(self, made: Any) -> bool:
        self._simulator = made
        return simulator.resets_freely(made)

    def _close(self) -> Any:
        ending, self._simulator = self._simulator, None
        return ending.close() if hasattr(ending, "close") else None


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """Do the jobs of one simulator, in order, until None comes."""
    with asyncio.Runner() as runner:
        while (job := jobs.get()) is not None:
            work, loop, done = job
            try:
                result = work()
                if asyncio.iscoroutine(result):
                    result = runner.run(result)
            except BaseException as error:
                _answer(loop, done, done.set_exception, _raisable(error))
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


def _raisable(error: BaseException) -> Exception:
    """The error as one that a future can carry: exits and interrupts end neither the thread nor the loop."""
    return error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RuntimeError(repr(error))

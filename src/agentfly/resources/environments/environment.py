"""Environment: a live simulator, and what a tool calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from agentfly.errors import ResourceDied, ResourceResetError
from agentfly.resources.environments.home import Home
from agentfly.resources.environments.loop_home import LoopHome
from agentfly.resources.environments.process_home import ProcessHome
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.thread_home import ThreadHome
from agentfly.resources.resource import Resource, Status

ABANDONED_CALL_S = 1.0
"""Seconds that a release waits for a call that nobody waits for any more, so that the simulator can be closed."""


class Environment(Resource):
    """A live simulator. Every public method of the user's object can be awaited on it, wherever the object lives.

    ``await environment.step("north")`` calls ``step`` of the user's object; what that returns or raises comes back as
    itself. Calls of one environment run one at a time, in order, except in the loop, where async methods may overlap.

    A call that is cancelled goes on to its end, and what comes next waits for it, so that a rollout that was cancelled
    does not cost the simulator. A call that outlives ``call_timeout_s`` does: the instance is lost and is replaced.

    A method of the user's object that has the name of one of this class's own is called by `call`.
    """

    spec: EnvironmentSpec

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        super().__init__(spec, instance)
        self._home = _home(spec, instance)
        self._resets_freely = False
        self._lost: str | None = "it has not been started"
        self._turn = asyncio.Lock()
        self._unfinished: set[asyncio.Task[Any]] = set()

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
            UsageError: the object has no such public method, or an argument or the result cannot travel to or from
                its process.
            ResourceDied: the simulator is gone, or the call took longer than ``call_timeout_s``.
        """
        task = asyncio.create_task(self._finish(method, args, kwargs), name=f"{self.instance}.{method}")
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def start(self) -> None:
        """Make the user's object, and reset it if it can be."""
        self._resets_freely = await self._home.start()
        self._lost = None
        if self._resets_freely:
            await self.call("reset")

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Make the simulator fresh: by its own ``reset``, whose result comes back, or by making it anew.

        Arguments are for the simulator's ``reset``: ``first = await environment.reset(seed=7)``. Without arguments,
        and without a ``reset`` that takes none, the object is closed and made anew.

        Raises:
            ResourceResetError: the simulator is lost.
        """
        await self._settle()
        if (why := self._why_lost()) is not None:
            raise ResourceResetError(f"{self.instance} cannot be reset: {why}.")
        if args or kwargs or self._resets_freely:
            return await self.call("reset", *args, **kwargs)
        self._lost = "its making anew was interrupted"
        await self._home.stop(close_s=self.spec.release_timeout_s)
        await self._home.start()
        self._lost = None
        return None

    async def status(self) -> Status:
        """Say whether the simulator can be used."""
        return Status.HEALTHY if self._why_lost() is None else Status.BROKEN

    async def release(self) -> None:
        """End the simulator; return when it is gone. A thread whose call hangs cannot be ended and is left behind."""
        lost, self._lost = self._why_lost(), "it was released"
        settled = await self._settle(min(ABANDONED_CALL_S, self.spec.release_timeout_s / 2))
        for task in self._unfinished:
            task.cancel()
        await self._home.stop(close_s=self.spec.release_timeout_s if settled and lost is None else 0)

    @property
    def traces(self) -> dict[str, Any]:
        """The process that a dead owner would leave; see `agentfly.resources.environments.kept_process.reap`."""
        return self._home.traces

    async def _finish(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        async with self._turn if self._home.serial else contextlib.nullcontext():
            if (why := self._why_lost()) is not None:
                raise ResourceDied(f"{self.spec.label} {self.instance} cannot be used: {why}.")
            deadline = asyncio.timeout(self.spec.call_timeout_s)
            try:
                async with deadline:
                    return await self._home.call(method, args, kwargs)
            except TimeoutError:
                if not deadline.expired():  # the simulator's own
                    raise
                self._lost = f"{method}() did not end within call_timeout_s={self.spec.call_timeout_s:g}"
                await self._home.stop(close_s=0)
                raise ResourceDied(f"{self.spec.label} {self.instance} is lost: {self._lost}.") from None

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; the failure is then nobody's

    async def _settle(self, timeout_s: float | None = None) -> bool:
        """Wait for calls that nobody waits for any more; say whether all have ended."""
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=timeout_s)
        return not self._unfinished

    def _why_lost(self) -> str | None:
        return self._lost or self._home.death


def _home(spec: EnvironmentSpec, instance: str) -> Home:
    match spec.runs:
        case "loop":
            return LoopHome(spec)
        case "thread":
            return ThreadHome(spec, instance)
        case "process":
            return ProcessHome(spec)

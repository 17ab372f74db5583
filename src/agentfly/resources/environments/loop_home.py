"""LoopHome: the simulator lives in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentfly.resources.environments import simulator
from agentfly.resources.environments.spec import EnvironmentSpec

logger = logging.getLogger(__name__)


class LoopHome:
    """Calls the simulator directly. Sync methods run to their end at once; async ones may overlap."""

    serial = False

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._simulator: Any = None

    async def start(self) -> bool:
        spec = self._spec
        self._simulator = await _do(lambda: simulator.make(spec.factory, spec.args, spec.keywords))
        simulator.require_made(self._simulator, spec.factory)
        simulator.require_thread_safe(self._simulator, spec.label)
        return simulator.resets_freely(self._simulator)

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
    def death(self) -> str | None:
        return None

    @property
    def has_hung_up(self) -> bool:
        return False

    @property
    def traces(self) -> dict[str, Any]:
        return {}


async def _do(work: Callable[[], Any]) -> Any:
    """What the user's code gives. What it raises that is no `Exception`, such as its exit, leaves it as one."""
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

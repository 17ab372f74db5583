"""LoopHome: the simulator lives in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
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
        made = simulator.make(self._spec.factory, self._spec.args, self._spec.keywords)
        self._simulator = await made if asyncio.iscoroutine(made) else made
        return simulator.resets_freely(self._simulator)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = simulator.call(self._simulator, method, args, kwargs)
        return await result if asyncio.iscoroutine(result) else result

    async def stop(self, *, close_s: float) -> None:
        ending, self._simulator = self._simulator, None
        if close_s and hasattr(ending, "close"):
            try:
                async with asyncio.timeout(close_s):
                    closed = ending.close()
                    if asyncio.iscoroutine(closed):
                        await closed
            except Exception:
                logger.warning("Closing an environment failed; it is dropped: %s", self._spec.label, exc_info=True)

    @property
    def death(self) -> str | None:
        return None

    @property
    def traces(self) -> dict[str, Any]:
        return {}

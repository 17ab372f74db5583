"""ProcessHome: the simulator lives in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import ResourceDied
from agentfly.resources.environments.kept_process import KeptProcess
from agentfly.resources.environments.parcel import pack, unpack
from agentfly.resources.environments.returned_error import unpack_error
from agentfly.resources.environments.spec import EnvironmentSpec

logger = logging.getLogger(__name__)


class ProcessHome:
    """Sends calls to the simulator's process, and its exceptions and its end back."""

    serial = True

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._process: KeptProcess | None = None
        self._exhausted = False

    async def start(self) -> bool:
        self._exhausted = False
        self._process = KeptProcess(self._spec.memory_bytes)
        await self._process.start()
        return bool(await self._ask("its factory", ("make", sys.path, self._spec.parcel())))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._ask(f"{method}()", ("call", method, args, dict(kwargs)))

    async def stop(self, *, within_s: float, close: bool) -> None:
        if self._process is None:
            return
        if close and self.death is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._ask("close()", ("close",))
            except Exception:
                logger.warning("Closing an environment failed; it is killed: %s", self._spec.label, exc_info=True)
        await self._process.stop()
        self._process = None

    @property
    def death(self) -> str | None:
        if self._exhausted:
            return "it ran out of memory"
        return "its process has ended" if self._process is not None and self._process.ended else None

    @property
    def traces(self) -> dict[str, Any]:
        return self._process.traces if self._process is not None else {}

    async def _ask(self, what: str, request: tuple[Any, ...]) -> Any:
        if self._process is None:
            raise ResourceDied(f"{self._spec.label} is not running, so {what} cannot be called.")
        parcel = pack(request, ("request", "method", "args", "kwargs")[: len(request)])
        try:
            answer = unpack(await self._process.ask(parcel))
        except EOFError:
            obituary = await self._process.obituary()
            raise ResourceDied(f"The process of {self._spec.label} ended during {what}: {obituary}") from None
        match answer:
            case ("value", value):
                return value
            case ("memory", message):
                self._exhausted = True
                limit = f"its limit of {self._spec.memory}" if self._spec.memory else "the machine's memory"
                raise ResourceDied(f"{self._spec.label} ran out of {limit} during {what}. {message}".rstrip())
            case _:
                raise unpack_error(*answer[1:])

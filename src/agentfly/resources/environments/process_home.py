"""ProcessHome: the simulator lives in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import ResourceDied, UsageError
from agentfly.resources.environments.kept_process import KeptProcess
from agentfly.resources.environments.memory_bound import MemoryBound
from agentfly.resources.environments.nursery import nursery_of
from agentfly.resources.environments.parcel import pack, unpack
from agentfly.resources.environments.returned_error import unpack_error
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.worker import Surroundings
from agentfly.resources.fresh_python import end_in_words

logger = logging.getLogger(__name__)


class ProcessHome:
    """Sends calls to the simulator's process, and its exceptions and its end back."""

    serial = True

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        self._spec = spec
        self._bound = MemoryBound.of(spec.memory_bytes, instance) if spec.memory_bytes else None
        self._process: KeptProcess | None = None
        self._exhausted = False

    async def start(self) -> bool:
        self._exhausted = False
        spec = self._spec
        self._process = KeptProcess(
            nursery_of(spec.factory, spec.label) if spec.starts == "fork" else None, self._bound
        )
        await self._process.start()
        return bool(await self._ask("its factory", ("make", Surroundings.here(), spec.parcel())))

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

    def freeze(self) -> None:
        """Stop the simulator, with all that it has started, where it is."""
        if self._process is not None:
            self._process.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            self._process.thaw()

    @property
    def death(self) -> str | None:
        if self._exhausted:
            return "it ran out of memory"
        process = self._process
        if process is None or not process.ended:
            return None
        told = process.last_words
        if told is not None and told.out_of_memory:
            return "it ran out of memory"
        how = _how(None if told is None else told.exit)
        return f"its process has ended: {how}" + (f". The end of its output:\n{process.tail}" if process.tail else "")

    @property
    def has_hung_up(self) -> bool:
        return self._exhausted or (self._process is not None and self._process.has_hung_up)

    @property
    def traces(self) -> dict[str, Any]:
        bound = {} if self._bound is None else {"bound": dataclasses.asdict(self._bound)}
        return bound | (self._process.traces if self._process is not None else {})

    async def _ask(self, what: str, request: tuple[Any, ...]) -> Any:
        if self._process is None:
            raise ResourceDied(f"{self._spec.label} is not running, so {what} cannot be called.")
        parcel = pack(request, ("request", "method", "args", "kwargs")[: len(request)])
        try:
            reply = await self._process.ask(parcel)
        except EOFError:
            raise await self._died(self._process, what) from None
        try:
            answer = unpack(reply)
        except Exception as error:
            raise UsageError(
                f"What {what} of {self._spec.label} gave cannot be read outside of its process: {error!r}. Let it give "
                "plain values, or objects that pickle can restore."
            ) from error
        match answer:
            case ("value", value):
                return value
            case ("memory", message):
                self._exhausted = True
                raise self._ran_out(what, message)
            case _:
                raise unpack_error(*answer[1:])

    async def _died(self, process: KeptProcess, what: str) -> ResourceDied:
        obituary = await process.obituary()
        tail = f"The end of its output:\n{process.tail}" if process.tail else "It wrote nothing to its output."
        if obituary.out_of_memory:
            self._exhausted = True
            return self._ran_out(what, f"Its processes were killed. {tail}")
        return ResourceDied(f"The process of {self._spec.label} ended during {what}: {_how(obituary.exit)}. {tail}")

    def _ran_out(self, what: str, how: str) -> ResourceDied:
        of = f"its limit of {self._spec.memory}" if self._bound else "the machine's memory"
        return ResourceDied(f"{self._spec.label} ran out of {of} during {what}. {how}".rstrip())


def _how(status: int | None) -> str:
    return "nothing tells how it ended" if status is None else end_in_words(status)

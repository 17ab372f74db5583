"""ProcessHome: the simulator lives in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agentfly.errors import ResourceDied, ResourceError, UsageError
from agentfly.resources.cgroups import cgroup_home
from agentfly.resources.environments.data_reader import decode
from agentfly.resources.environments.declared_types import DeclaredTypes
from agentfly.resources.environments.kept_process import KeptProcess
from agentfly.resources.environments.memory_bound import MemoryBound
from agentfly.resources.environments.nursery import nursery_of
from agentfly.resources.environments.parcel import pack, unpack
from agentfly.resources.environments.plain_data import Malformed
from agentfly.resources.environments.private_directory import PrivateDirectory
from agentfly.resources.environments.returned_error import made_error
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.worker import Making, Surroundings
from agentfly.resources.fresh_python import end_in_words, search_path
from agentfly.resources.variables import basic_variables
from agentfly.threads.pool import on_thread

logger = logging.getLogger(__name__)

READ_AT_ONCE_BYTES = 1 << 14
"""Answers up to this are read in the event loop, which takes less than handing them to a thread."""

OUT_OF_MEMORY = "it ran out of memory"


class ProcessHome:
    """Sends calls to the simulator's process, and its exceptions and its end back."""

    serial = True

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        self._spec = spec
        self._instance = instance
        self._directory = PrivateDirectory(instance)
        self._types = DeclaredTypes(spec.result_types)
        self._process: KeptProcess | None = None
        self._lost: str | None = None
        self._gone = False

    @cached_property
    def _bound(self) -> MemoryBound | None:
        """The limit on its memory. Where control groups can be made has been tried before, which takes a while."""
        return MemoryBound.of(self._spec.memory_bytes, self._instance) if self._spec.memory_bytes else None

    async def start(self) -> bool:
        self._lost, self._gone = None, False
        spec = self._spec
        if spec.memory_bytes:
            await on_thread(cgroup_home)  # the engine has done so, in `prepare`
        variables = {**basic_variables(), "TMPDIR": self._directory.temporary, **dict(spec.env)}
        surroundings = Surroundings(search_path(), spec.workdir or self._directory.work, variables)
        making = Making(spec.parcel(), surroundings, spec.allow_pickle)
        self._directory.make()
        self._process = KeptProcess(
            nursery_of(spec) if spec.starts == "fork" else None, self._bound, str(self._directory.path), variables
        )
        await self._process.start()
        return bool(await self._ask("its factory", ("make", making)))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._ask(f"{method}()", ("call", method, args, dict(kwargs)))

    async def stop(self, *, within_s: float, close: bool) -> None:
        if self._process is None:
            await self._tidy_up()
            return
        if close and self.death is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._ask("close()", ("close",))
            except Exception:
                logger.warning("Closing an environment failed; it is killed: %s", self._spec.label, exc_info=True)
        await self._process.stop()
        self._process = None
        await self._tidy_up()

    async def _tidy_up(self) -> None:
        try:
            await self._directory.remove()
        except OSError as error:
            raise ResourceError(
                f"The directory {self._directory.path} of {self._spec.label} cannot be removed: {error}. See what is "
                "in it, and remove it by hand."
            ) from error
        self._gone = True

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
        if self._lost is not None:
            return self._lost
        process = self._process
        if process is None or not process.ended:
            return None
        told = process.last_words
        if told is not None and told.out_of_memory:
            return OUT_OF_MEMORY
        how = _how(None if told is None else told.exit)
        return f"its process has ended: {how}" + (f". The end of its output:\n{process.tail}" if process.tail else "")

    @property
    def has_hung_up(self) -> bool:
        return self._lost is not None or (self._process is not None and self._process.has_hung_up)

    @property
    def traces(self) -> dict[str, Any]:
        bound = {} if self._bound is None else {"bound": dataclasses.asdict(self._bound)}
        of_process = self._process.traces if self._process is not None else {}
        return {} if self._gone else bound | of_process | {"directory": str(self._directory.path)}

    async def _ask(self, what: str, request: tuple[Any, ...]) -> Any:
        if self._process is None:
            raise ResourceDied(f"{self._spec.label} is not running, so {what} cannot be called.")
        parcel = pack(request, ("request", "method", "args", "kwargs")[: len(request)])
        try:
            answer = await self._process.ask(parcel)
            return self._result(what, await self._read(answer))
        except EOFError:
            raise await self._died(self._process, what) from None
        except Malformed as error:
            self._lost = f"its answer to {what} was no answer: {error}"
            raise ResourceDied(f"{self._spec.label} is lost: {self._lost}.") from None

    async def _read(self, answer: bytes) -> Any:
        """What an answer holds; a long one is read on another thread, so that nobody else has to wait.

        Raises:
            Malformed: it holds nothing.
        """
        if len(answer) <= READ_AT_ONCE_BYTES:
            return decode(answer, self._types)
        return await on_thread(decode, answer, self._types)

    def _result(self, what: str, answer: Any) -> Any:
        """What a call gave; it raises what the call raised.

        Raises:
            Malformed: it is neither.
        """
        trusted = self._spec.allow_pickle
        match answer:
            case ("value", value) if not trusted:
                return value
            case ("pickled", bytes() as parcel) if trusted:
                return self._unpickled(what, parcel)
            case ("memory", str() as message):
                self._lost = OUT_OF_MEMORY
                raise self._ran_out(what, message)
            case ("error", told, bytes() | None as parcel):
                try:
                    error = made_error(told, self._types, parcel if trusted else None)
                except (TypeError, ValueError):
                    raise Malformed("it tells of no exception") from None
                raise error
        raise Malformed("it is neither a result nor an exception")

    def _unpickled(self, what: str, parcel: bytes) -> Any:
        try:
            return unpack(parcel)
        except Exception as error:
            raise UsageError(
                f"What {what} of {self._spec.label} gave cannot be read outside of its process: {error!r}. Let it give "
                "plain values, or objects that pickle can restore."
            ) from error

    async def _died(self, process: KeptProcess, what: str) -> ResourceDied:
        obituary = await process.obituary()
        tail = f"The end of its output:\n{process.tail}" if process.tail else "It wrote nothing to its output."
        if obituary.out_of_memory:
            self._lost = OUT_OF_MEMORY
            return self._ran_out(what, f"Its processes were killed. {tail}")
        return ResourceDied(f"The process of {self._spec.label} ended during {what}: {_how(obituary.exit)}. {tail}")

    def _ran_out(self, what: str, how: str) -> ResourceDied:
        of = f"its limit of {self._spec.memory}" if self._bound else "the machine's memory"
        return ResourceDied(f"{self._spec.label} ran out of {of} during {what}. {how}".rstrip())


def _how(status: int | None) -> str:
    return "nothing tells how it ended" if status is None else end_in_words(status)

"""ProcessHost: runs the simulator in a separate process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from agentfly.core.errors import ResourceDied, ResourceError, UsageError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.environments.fork_server import fork_server_for
from agentfly.resources.environments.pickling import dumps, loads
from agentfly.resources.environments.private_directory import PrivateDirectory
from agentfly.resources.environments.remote_error import decode_error
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.environments.wire_format import decode
from agentfly.resources.environments.wire_types import DeclaredTypes, MalformedData
from agentfly.resources.environments.worker import ProcessContext, SimulatorSpec
from agentfly.resources.environments.worker_process import WorkerProcess
from agentfly.resources.process.cgroups import MemoryLimit, writable_cgroup_parent
from agentfly.resources.process.child import describe_exit, minimal_environment, search_path

logger = logging.getLogger(__name__)

INLINE_DECODE_BYTES = 1 << 14
"""Responses up to this size are decoded in the event loop, which is faster than a thread."""

OUT_OF_MEMORY = "it ran out of memory"


class ProcessHost:
    """Sends calls to the simulator's process, and returns its results, its exceptions and its end."""

    one_call_at_a_time = True

    def __init__(self, spec: EnvironmentSpec, instance: str) -> None:
        self._spec = spec
        self._instance = instance
        self._directory = PrivateDirectory(instance)
        self._types = DeclaredTypes(spec.result_types)
        self._process: WorkerProcess | None = None
        self._dead_reason: str | None = None
        self._gone = False

    @cached_property
    def _memory_limit(self) -> MemoryLimit | None:
        """The memory limit. The slow probe for control groups has run before."""
        return MemoryLimit.for_instance(self._spec.memory_bytes, self._instance) if self._spec.memory_bytes else None

    async def start(self) -> bool:
        self._dead_reason, self._gone = None, False
        spec = self._spec
        if spec.memory_bytes:
            await run_in_thread(writable_cgroup_parent)  # already done by `prepare` in an engine
        variables = {**minimal_environment(), "TMPDIR": self._directory.temporary, **dict(spec.env)}
        context = ProcessContext(search_path(), spec.workdir or self._directory.work, variables)
        simulator = SimulatorSpec(spec.pickled_factory(), context, spec.allow_pickle)
        self._directory.make()
        self._process = WorkerProcess(
            fork_server_for(spec) if spec.starts == "fork" else None,
            self._memory_limit,
            str(self._directory.path),
            variables,
        )
        await self._process.start()
        return bool(await self._ask("its factory", ("make", simulator)))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._ask(f"{method}()", ("call", method, args, dict(kwargs)))

    async def stop(self, *, within_s: float, close: bool) -> None:
        if self._process is None:
            await self._remove_directory()
            return
        if close and self.dead_reason is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._ask("close()", ("close",))
            except Exception:
                logger.warning("Closing an environment failed; it is killed: %s", self._spec.label, exc_info=True)
        await self._process.stop()
        self._process = None
        await self._remove_directory()

    async def _remove_directory(self) -> None:
        try:
            await self._directory.remove()
        except OSError as error:
            raise ResourceError(
                f"The directory {self._directory.path} of {self._spec.label} cannot be removed: {error}. Check its "
                "content, and remove it manually."
            ) from error
        self._gone = True

    def freeze(self) -> None:
        """Stop the simulator and all its descendants."""
        if self._process is not None:
            self._process.freeze()

    def thaw(self) -> None:
        """Continue the simulator and all its descendants."""
        if self._process is not None:
            self._process.thaw()

    @property
    def dead_reason(self) -> str | None:
        if self._dead_reason is not None:
            return self._dead_reason
        process = self._process
        if process is None or not process.ended:
            return None
        exit_info = process.exit_info
        if exit_info is not None and exit_info.out_of_memory:
            return OUT_OF_MEMORY
        how = _describe_exit(None if exit_info is None else exit_info.exit)
        return f"its process has ended: {how}" + (
            f". The end of its output:\n{process.output_tail}" if process.output_tail else ""
        )

    @property
    def peer_closed(self) -> bool:
        return self._dead_reason is not None or (self._process is not None and self._process.peer_closed)

    @property
    def traces(self) -> dict[str, Any]:
        limit = {} if self._memory_limit is None else {"memory_limit": dataclasses.asdict(self._memory_limit)}
        of_process = self._process.traces if self._process is not None else {}
        return {} if self._gone else limit | of_process | {"directory": str(self._directory.path)}

    async def _ask(self, what: str, request: tuple[Any, ...]) -> Any:
        if self._process is None:
            raise ResourceDied(f"{self._spec.label} is not running, so {what} cannot be called.")
        pickled = dumps(request, ("request", "method", "args", "kwargs")[: len(request)])
        try:
            answer = await self._process.request(pickled)
            return self._result(what, await self._read(answer))
        except EOFError:
            raise await self._died(self._process, what) from None
        except MalformedData as error:
            self._dead_reason = f"its answer to {what} was malformed: {error}"
            raise ResourceDied(f"{self._spec.label} is lost: {self._dead_reason}.") from None

    async def _read(self, answer: bytes) -> Any:
        """Decode a response; a long one on a thread, so that it does not block the event loop.

        Raises:
            MalformedData: it cannot be decoded.
        """
        if len(answer) <= INLINE_DECODE_BYTES:
            return decode(answer, self._types)
        return await run_in_thread(decode, answer, self._types)

    def _result(self, what: str, answer: Any) -> Any:
        """Return the result of a call, or raise its exception.

        Raises:
            MalformedData: the response is neither.
        """
        trusted = self._spec.allow_pickle
        match answer:
            case ("value", value) if not trusted:
                return value
            case ("pickled", bytes() as pickled) if trusted:
                return self._unpickled(what, pickled)
            case ("memory", str() as message):
                self._dead_reason = OUT_OF_MEMORY
                raise self._out_of_memory(what, message)
            case ("error", fields, bytes() | None as pickled):
                try:
                    error = decode_error(fields, self._types, pickled if trusted else None)
                except (TypeError, ValueError):
                    raise MalformedData("it does not describe an exception") from None
                raise error
        raise MalformedData("it is neither a result nor an exception")

    def _unpickled(self, what: str, pickled: bytes) -> Any:
        try:
            return loads(pickled)
        except Exception as error:
            raise UsageError(
                f"The result of {what} of {self._spec.label} cannot be read outside its process: {error!r}. Return "
                "plain values, or objects that pickle can restore."
            ) from error

    async def _died(self, process: WorkerProcess, what: str) -> ResourceDied:
        exit_info = await process.wait_exit()
        tail = (
            f"The end of its output:\n{process.output_tail}"
            if process.output_tail
            else "It wrote nothing to its output."
        )
        if exit_info.out_of_memory:
            self._dead_reason = OUT_OF_MEMORY
            return self._out_of_memory(what, f"Its processes were killed. {tail}")
        return ResourceDied(
            f"The process of {self._spec.label} ended during {what}: {_describe_exit(exit_info.exit)}. {tail}"
        )

    def _out_of_memory(self, what: str, details: str) -> ResourceDied:
        limit = f"its limit of {self._spec.memory}" if self._memory_limit else "the machine's memory"
        return ResourceDied(f"{self._spec.label} ran out of {limit} during {what}. {details}".rstrip())


def _describe_exit(status: int | None) -> str:
    return "the cause is unknown" if status is None else describe_exit(status)

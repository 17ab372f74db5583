"""The program of a simulator's process: creates the simulator and answers calls, one frame each way.

A frame is a length in 8 bytes, big-endian, and that many bytes. A request is a pickle of ``(what, ...)``. A response is
in the wire format, because reading it must not run code: ``("value", value)``, ``("error", fields, None)`` with the
fields of `encode_error`, or ``("memory", message)``, which is the last one. With ``allow_pickle`` a result is
``("pickled", bytes)``, and the last part of an error is a pickle too.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import UsageError
from agentfly.resources.environments import simulator
from agentfly.resources.environments.pickling import dumps_plain, find_unpicklable, loads
from agentfly.resources.environments.remote_error import encode_error, pickle_error
from agentfly.resources.environments.wire_format import encode
from agentfly.resources.environments.wire_types import DeclaredTypes, NotSerializable
from agentfly.resources.process.memory_limit import MemoryLimit

FRAME_LENGTH = struct.Struct(">Q")


def serve_requests(calls: socket.socket, bound: MemoryLimit | None) -> None:
    """Answer requests, under a bound of memory, until the other side hangs up."""
    os.dup2(2, 1)  # what the simulator prints goes where its errors go
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # else what it printed last would be lost in a crash
    if bound is not None:
        bound.join()
    subject, own = _SimulatorServer(), os.getpid()
    while (request := _receive(calls)) is not None:
        answer = subject.answer(request)
        if os.getpid() != own:  # a fork that the simulator made and forgot to end: one process must answer, not two
            os._exit(0)
        if bound is not None and bound.oom_kills():  # of what it had started, which it may take for any kind of failure
            answer = _memory("A process that it had started was killed.")
        calls.sendall(FRAME_LENGTH.pack(len(answer)) + answer)


@dataclass(frozen=True)
class ProcessContext:
    """What a process is given before the simulator is made in it.

    Args:
        path: where it looks for modules.
        directory: where it works.
        environment: all of its environment variables.
    """

    path: list[str]
    directory: str
    environment: dict[str, str]

    def apply(self) -> None:
        """Make them those of this process.

        Raises:
            UsageError: its directory cannot be entered.
        """
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # an import may have asked where it is, before the fork
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise UsageError(f"EnvironmentSpec(workdir={self.directory!r}) cannot be entered: {error}") from error


@dataclass(frozen=True)
class SimulatorSpec:
    """How a simulator is made, and what may come out of its process.

    Args:
        parcel: the factory, its arguments, and the types that are declared of results.
        surroundings: the process's.
        pickles: whether results may be pickles.
    """

    parcel: bytes
    surroundings: ProcessContext
    pickles: bool


class _SimulatorServer:
    """The simulator, and the loop that its async methods need."""

    def __init__(self) -> None:
        self._simulator: Any = None
        self._runner: Any = None
        self._types = DeclaredTypes()
        self._pickles = False

    def answer(self, request: bytes) -> bytes:
        """Do what is asked; the answer, as bytes."""
        try:
            return self._packed(self._do(*_opened(request)))
        except MemoryError as error:
            return _memory(str(error))
        except KeyboardInterrupt:  # sent to this process, to end it
            raise
        except BaseException as error:
            return self._failure(simulator.as_exception(error))

    def _failure(self, error: Exception) -> bytes:
        told = encode_error(error)
        parcel = pickle_error(error) if self._pickles else None
        try:
            return encode(("error", told, parcel), self._types)
        except NotSerializable:  # too much of it
            name, base, _, _, message, trace = told
            return encode(("error", (name, base, None, {}, message[:10_000], trace[-10_000:]), None), self._types)

    def _packed(self, value: Any) -> bytes:
        """A result as bytes.

        Raises:
            UsageError: it cannot travel. The message has the path of the part that is to blame.
        """
        if self._pickles:
            return encode(("pickled", dumps_plain(value)), self._types)
        try:
            return encode(("value", value), self._types)
        except NotSerializable as error:
            path, culprit = find_unpicklable(value, "the result", self._is_data)
            why = self._why_not(culprit) or error.why
            kind = type(culprit)
            raise UsageError(
                f"{path} is a {kind.__module__}.{kind.__qualname__} and cannot leave the simulator's process: it "
                f"{why}. Return numbers, texts, bytes, lists, tuples, dicts, sets, times or NumPy arrays; or declare "
                "its type in result_types=(…,), if it is a dataclass, named tuple, enum or pydantic model. "
                "allow_pickle=True lets any object pass, and the simulator's process run any code in this one."
            ) from None

    def _why_not(self, value: Any) -> str | None:
        try:
            encode(value, self._types)
        except NotSerializable as error:
            return error.why
        return None

    def _is_data(self, value: Any) -> bool:
        return self._why_not(value) is None

    def _do(self, what: str, *details: Any) -> Any:
        if what == "make":
            return self._make(*details)
        if what == "close":
            return self._resolve(self._simulator.close()) if hasattr(self._simulator, "close") else None
        method, args, kwargs = details  # of a "call"
        return self._resolve(simulator.call(self._simulator, method, args, kwargs))

    def _make(self, making: SimulatorSpec) -> bool:
        making.surroundings.apply()
        self._pickles = making.pickles
        factory, args, kwargs, types = loads(making.parcel)
        self._types = DeclaredTypes(types)
        self._simulator = self._resolve(simulator.make(factory, args, kwargs))
        simulator.require_made(self._simulator, factory)
        return simulator.has_argless_reset(self._simulator)

    def _resolve(self, result: Any) -> Any:
        if not isinstance(result, Awaitable):
            return result
        if self._runner is None:
            import asyncio  # here, because a sync simulator starts faster without it

            self._runner = asyncio.Runner()
        return self._runner.run(simulator.as_coroutine(result))


def _memory(message: str) -> bytes:
    return encode(("memory", message), DeclaredTypes())


def _opened(request: bytes) -> Any:
    try:
        return loads(request)
    except Exception as error:
        raise UsageError(
            f"The arguments of a call cannot be read in the simulator's process: {error!r}. Give plain values, or "
            "objects that pickle can restore there."
        ) from error


def _receive(calls: socket.socket) -> bytes | None:
    header = _exactly(calls, FRAME_LENGTH.size)
    return None if header is None else _exactly(calls, FRAME_LENGTH.unpack(header)[0])


def _exactly(calls: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        chunk = calls.recv(min(count - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)

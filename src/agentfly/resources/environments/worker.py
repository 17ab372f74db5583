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
from agentfly.resources.process.cgroups import MemoryLimit

FRAME_LENGTH = struct.Struct(">Q")


def serve_requests(calls: socket.socket, memory_limit: MemoryLimit | None) -> None:
    """Answer requests, under a memory limit, until the other side closes the connection."""
    os.dup2(2, 1)  # stdout goes where stderr goes
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # otherwise a crash loses the last output
    if memory_limit is not None:
        memory_limit.join()
    server, own_pid = _SimulatorServer(), os.getpid()
    while (request := _receive(calls)) is not None:
        answer = server.answer(request)
        if os.getpid() != own_pid:  # a forgotten fork of the simulator: only one process may answer
            os._exit(0)
        if (
            memory_limit is not None and memory_limit.oom_kills()
        ):  # the simulator may report a killed child as any error
            answer = _memory("A process that it had started was killed.")
        calls.sendall(FRAME_LENGTH.pack(len(answer)) + answer)


@dataclass(frozen=True)
class ProcessContext:
    """The settings of a process before the simulator is created in it.

    Args:
        path: its module search path.
        directory: its working directory.
        environment: all its environment variables.
    """

    path: list[str]
    directory: str
    environment: dict[str, str]

    def apply(self) -> None:
        """Apply the settings to this process.

        Raises:
            UsageError: its directory cannot be entered.
        """
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # an import may have cached it before the fork
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise UsageError(f"EnvironmentSpec(workdir={self.directory!r}) cannot be entered: {error}") from error


@dataclass(frozen=True)
class SimulatorSpec:
    """The factory of a simulator, and the allowed types of its results.

    Args:
        pickled: the factory, its arguments and the declared result types, as a pickle.
        context: the settings of the process.
        allow_pickle: whether results may be pickles.
    """

    pickled: bytes
    context: ProcessContext
    allow_pickle: bool


class _SimulatorServer:
    """The simulator, with an event loop for its async methods."""

    def __init__(self) -> None:
        self._simulator: Any = None
        self._runner: Any = None
        self._types = DeclaredTypes()
        self._allow_pickle = False

    def answer(self, request: bytes) -> bytes:
        """Carry out a request and return the response as bytes."""
        try:
            return self._encode(self._do(*_load_request(request)))
        except MemoryError as error:
            return _memory(str(error))
        except KeyboardInterrupt:  # a signal that ends this process
            raise
        except BaseException as error:
            return self._failure(simulator.as_exception(error))

    def _failure(self, error: Exception) -> bytes:
        fields = encode_error(error)
        pickled = pickle_error(error) if self._allow_pickle else None
        try:
            return encode(("error", fields, pickled), self._types)
        except NotSerializable:  # too large
            name, base, _, _, message, trace = fields
            return encode(("error", (name, base, None, {}, message[:10_000], trace[-10_000:]), None), self._types)

    def _encode(self, value: Any) -> bytes:
        """Encode a result.

        Raises:
            UsageError: it cannot be encoded. The message has the path of the offending part.
        """
        if self._allow_pickle:
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

    def _make(self, spec: SimulatorSpec) -> bool:
        spec.context.apply()
        self._allow_pickle = spec.allow_pickle
        factory, args, kwargs, types = loads(spec.pickled)
        self._types = DeclaredTypes(types)
        self._simulator = self._resolve(simulator.make(factory, args, kwargs))
        simulator.require_made(self._simulator, factory)
        return simulator.has_argless_reset(self._simulator)

    def _resolve(self, result: Any) -> Any:
        if not isinstance(result, Awaitable):
            return result
        if self._runner is None:
            import asyncio  # imported here, because a sync simulator starts faster without it

            self._runner = asyncio.Runner()
        return self._runner.run(simulator.as_coroutine(result))


def _memory(message: str) -> bytes:
    return encode(("memory", message), DeclaredTypes())


def _load_request(request: bytes) -> Any:
    try:
        return loads(request)
    except Exception as error:
        raise UsageError(
            f"The arguments of a call cannot be read in the simulator's process: {error!r}. Give plain values, or "
            "objects that pickle can restore there."
        ) from error


def _receive(calls: socket.socket) -> bytes | None:
    header = _receive_exactly(calls, FRAME_LENGTH.size)
    return None if header is None else _receive_exactly(calls, FRAME_LENGTH.unpack(header)[0])


def _receive_exactly(calls: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        chunk = calls.recv(min(count - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)

"""The inside of a simulator's process: it makes the simulator and answers calls, one frame each way.

Frames are a length in 8 bytes, big-endian, and that many bytes of parcel. A request is ``(what, ...)``; an answer is
``("value", value)``, ``("error", ...)`` with what `pack_error` gives, or ``("memory", message)``, which is the last.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from agentfly.errors import UsageError
from agentfly.resources.environments import simulator
from agentfly.resources.environments.memory_bound import MemoryBound
from agentfly.resources.environments.parcel import pack_quickly, unpack
from agentfly.resources.environments.returned_error import pack_error
from agentfly.resources.fresh_python import search_path

LENGTH = struct.Struct(">Q")


def serve(calls: socket.socket, bound: MemoryBound | None) -> None:
    """Answer requests, under a bound of memory, until the other side hangs up."""
    os.dup2(2, 1)  # what the simulator prints goes where its errors go
    if bound is not None:
        bound.enter()
    subject, own = _Subject(), os.getpid()
    while (request := _receive(calls)) is not None:
        try:
            answer = pack_quickly(("value", subject.do(*_opened(request))))
        except MemoryError as error:
            answer = pickle.dumps(("memory", str(error)))
        except KeyboardInterrupt:  # sent to this process, to end it
            raise
        except BaseException as error:
            answer = pickle.dumps(("error", *pack_error(simulator.as_exception(error))))
        if os.getpid() != own:  # a fork that the simulator made and forgot to end: one process must answer, not two
            os._exit(0)
        if bound is not None and bound.kills():  # of what it had started, which it may take for any kind of failure
            answer = pickle.dumps(("memory", "A process that it had started was killed."))
        calls.sendall(LENGTH.pack(len(answer)) + answer)


@dataclass(frozen=True)
class Surroundings:
    """What a process takes over from the one that the simulator belongs to, as it is when the simulator is made."""

    path: list[str]
    directory: str
    environment: dict[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        try:
            directory = os.getcwd()  # noqa: PTH109
        except OSError:  # it was removed
            directory = "/"
        return cls(search_path(), directory, dict(os.environ))

    def enter(self) -> None:
        """Make them those of this process."""
        sys.path[:] = self.path
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)


class _Subject:
    """The simulator, and the loop that its async methods need."""

    def __init__(self) -> None:
        self._simulator: Any = None
        self._runner: Any = None

    def do(self, what: str, *details: Any) -> Any:
        if what == "make":
            surroundings, parcel = details
            surroundings.enter()
            factory, args, kwargs = unpack(parcel)
            self._simulator = self._resolve(simulator.make(factory, args, kwargs))
            simulator.require_made(self._simulator, factory)
            return simulator.resets_freely(self._simulator)
        if what == "close":
            return self._resolve(self._simulator.close()) if hasattr(self._simulator, "close") else None
        method, args, kwargs = details  # of a "call"
        return self._resolve(simulator.call(self._simulator, method, args, kwargs))

    def _resolve(self, result: Any) -> Any:
        if not isinstance(result, Awaitable):
            return result
        if self._runner is None:
            import asyncio  # here, because a sync simulator starts faster without it

            self._runner = asyncio.Runner()
        return self._runner.run(simulator.outcome(result))


def _opened(request: bytes) -> Any:
    try:
        return unpack(request)
    except Exception as error:
        raise UsageError(
            f"The arguments of a call cannot be read in the simulator's process: {error!r}. Give plain values, or "
            "objects that pickle can restore there."
        ) from error


def _receive(calls: socket.socket) -> bytes | None:
    header = _exactly(calls, LENGTH.size)
    return None if header is None else _exactly(calls, LENGTH.unpack(header)[0])


def _exactly(calls: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        chunk = calls.recv(min(count - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)

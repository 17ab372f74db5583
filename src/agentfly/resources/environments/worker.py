"""The inside of a simulator's process: it makes the simulator and answers calls, one frame each way.

Frames are a length in 8 bytes, big-endian, and that many bytes of parcel. A request is ``(what, ...)``; an answer is
``("value", value)``, ``("error", ...)`` with what `pack_error` gives, or ``("memory", message)``.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable
from typing import Any

from agentfly.resources.environments import simulator
from agentfly.resources.environments.parcel import pack_quickly, unpack
from agentfly.resources.environments.returned_error import pack_error

LENGTH = struct.Struct(">Q")


def serve(calls: socket.socket, memory_bytes: int) -> None:
    """Answer requests until the other side hangs up."""
    os.dup2(2, 1)  # what the simulator prints goes where its errors go
    if memory_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    subject = _Subject()
    while (request := _receive(calls)) is not None:
        try:
            answer = pack_quickly(("value", subject.do(*unpack(request))))
        except MemoryError as error:
            answer = pickle.dumps(("memory", str(error)))
        except KeyboardInterrupt:  # sent to this process, to end it
            raise
        except BaseException as error:
            answer = pickle.dumps(("error", *pack_error(simulator.as_exception(error))))
        calls.sendall(LENGTH.pack(len(answer)) + answer)


class _Subject:
    """The simulator, and the loop that its async methods need."""

    def __init__(self) -> None:
        self._simulator: Any = None
        self._runner: Any = None

    def do(self, what: str, *details: Any) -> Any:
        if what == "make":
            path, parcel = details
            sys.path[:] = path
            self._simulator = self._resolve(simulator.make(*unpack(parcel)))
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

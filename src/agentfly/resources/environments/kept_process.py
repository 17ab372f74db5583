"""KeptProcess: this process's side of a simulator's process and its keeper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from agentfly.errors import ResourceError
from agentfly.resources.environments.worker import LENGTH
from agentfly.resources.identity import start_time

logger = logging.getLogger(__name__)

TAIL_BYTES = 4096
"""How much of the end of a simulator's output is kept for the message about its death."""

FORCE_S = 5.0
"""Seconds a keeper may take to end everything below it before it is killed itself."""

# The path is set before anything of AgentFly is imported, so that both sides run the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from agentfly.resources.environments.keeper import main; main(*map(int, sys.argv[2:]))"
)


class KeptProcess:
    """A process that answers parcels with parcels, one at a time, and whose end is noticed and told.

    Args:
        memory_bytes: limit on the address space of each of its processes; 0 means none.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._keeper: subprocess.Popen[bytes] | None = None
        self._calls: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._life: asyncio.StreamWriter | None = None
        self._output: asyncio.ReadTransport | None = None
        self._last_words: asyncio.Task[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._tail = b""
        self.traces: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the keeper and, by it, the process."""
        with contextlib.ExitStack() as far_ends:  # which are for the keeper alone
            # What can be interrupted comes before there is a process to lose, and each near end belongs to its
            # connection from the moment it is made, so that it is closed wherever this ends.
            near, calls = socket.socketpair()
            far_ends.enter_context(calls)
            self._calls = await asyncio.open_connection(sock=near)
            near, life = socket.socketpair()
            far_ends.enter_context(life)
            words, self._life = await asyncio.open_connection(sock=near)
            reading, errors = os.pipe()
            far_ends.callback(os.close, errors)
            output = await self._open_output(reading)
            self._keeper = self._spawn(calls, life, errors)
        self._last_words = asyncio.create_task(words.read())
        self._listening = asyncio.create_task(self._listen(output))
        self.traces = {"pid": self._keeper.pid, "start_time": start_time(self._keeper.pid)}

    async def ask(self, request: bytes) -> bytes:
        """Send a parcel and get the one that answers it.

        Raises:
            EOFError: the process is gone.
        """
        assert self._calls is not None
        reader, writer = self._calls
        try:
            writer.writelines([LENGTH.pack(len(request)), request])
            await writer.drain()
            return await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
        except ConnectionError as error:
            raise EOFError from error

    @property
    def ended(self) -> bool:
        """Whether the process has ended, with everything that it had started."""
        return self._last_words is not None and self._last_words.done()

    async def obituary(self) -> str:
        """How the process ended, and the end of what it wrote to its standard error."""
        status = None
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(FORCE_S):
                assert self._last_words is not None
                assert self._listening is not None
                words = await asyncio.shield(self._last_words)
                await asyncio.shield(self._listening)
                status = json.loads(words)["exit"]
        tail = self._tail.decode(errors="replace").strip()
        return _how(status) + (f" The end of its output:\n{tail}" if tail else " It wrote nothing to its output.")

    async def stop(self) -> None:
        """Kill the process and everything that it had started; return when they are gone."""
        if self._life is not None and self._last_words is not None and self._keeper is not None:
            with contextlib.suppress(OSError):
                self._life.write_eof()
            try:
                async with asyncio.timeout(FORCE_S):
                    await asyncio.shield(self._last_words)
            except TimeoutError:
                logger.warning("The keeper %d of a simulator does not end and is killed.", self._keeper.pid)
                self._keeper.kill()
            except OSError:
                pass  # a reset says the same as an end
            while self._keeper.poll() is None:  # noqa: ASYNC110  (its sockets close an instant before it can be reaped)
                await asyncio.sleep(0.001)
        for task in (self._last_words, self._listening):
            if task is not None:
                task.cancel()
        for transport in (self._calls and self._calls[1], self._life, self._output):
            if transport is not None:
                transport.close()

    def _spawn(self, calls: socket.socket, life: socket.socket, errors: int) -> subprocess.Popen[bytes]:
        numbers = (calls.fileno(), life.fileno(), os.getpid(), self._memory_bytes)
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(calls.fileno(), life.fileno()),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )

    async def _open_output(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return reader

    async def _listen(self, output: asyncio.StreamReader) -> None:
        """Keep the end of what the process writes, so that it can neither fill a disk nor block."""
        while chunk := await output.read(1 << 16):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]


def reap(traces: Mapping[str, Any]) -> None:
    """End a keeper that a dead process left, and all below it. The `reap` of the kind; traces as of `KeptProcess`.

    A keeper ends by itself within a second of its process's death; this is for one that could not.

    Raises:
        ResourceError: it does not end.
    """
    pid, started = traces.get("pid"), traces.get("start_time")
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + FORCE_S
        if pid is not None and start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
                os.kill(pid, signal.SIGCONT)  # a stopped one would not hear
        while time.monotonic() < deadline:
            if pid is None or start_time(pid) != started:
                return
            time.sleep(0.01)
    raise ResourceError(
        f"The keeper {pid} of a simulator does not end, not even by SIGKILL. Look for what holds it up."
    )


def _how(status: int | None) -> str:
    if status is None:
        return "nothing tells how it ended."
    if status >= 0:
        return f"it exited with status {status}."
    name = signal.Signals(-status).name
    return f"it was ended by {name}" + (", perhaps for lack of memory." if name == "SIGKILL" else ".")

"""PortForwarder: listens on this host for the TCP ports inside a sandbox, whether that has a network or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from agentfly.core.errors import ResourceDied, ResourceError

LOOPBACK = "127.0.0.1"
_CHUNK = 64 * 1024

Connect = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Carries one connection to a port inside, until either side ends it."""


class PortForwarder:
    """Listens on this host's loopback for the ports of a sandbox, with one listener per port inside."""

    def __init__(self, sandbox: str, connect: Connect, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Create a forwarder that does not listen yet.

        Args:
            sandbox: its name, for messages.
            connect: carries a connection. It is cancelled when the forwarder closes.
            prepare: called before a listener is created; `close` waits for it.
        """
        self._sandbox = sandbox
        self._connect = connect
        self._prepare = prepare
        self._listening: dict[int, asyncio.Task[asyncio.Server]] = {}  # a caller's cancellation does not cancel them
        self._connections: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self, inside: int) -> tuple[str, int]:
        """Host and port that lead to a port inside; the same for every call.

        Raises:
            ResourceDied: the sandbox is gone.
            ResourceError: this process has too many files open.
        """
        if self._closed:
            raise ResourceDied(f"The sandbox {self._sandbox} is gone, and its ports with it.")
        if inside not in self._listening:
            self._listening[inside] = asyncio.create_task(self._listen(inside))
        listening = self._listening[inside]
        try:
            server = await asyncio.shield(listening)
        except (OSError, ResourceDied) as error:
            if self._listening.get(inside) is listening:
                del self._listening[inside]
            if isinstance(error, ResourceDied):
                raise
            raise ResourceError(f"The port {inside} of {self._sandbox} could not be opened: {error}") from error
        if self._closed:
            raise ResourceDied(f"The sandbox {self._sandbox} was released while its port {inside} was opened.")
        host, port = server.sockets[0].getsockname()
        return str(host), int(port)

    async def close(self) -> None:
        """Close every port and connection, also those that are being opened. Idempotent."""
        self._closed = True
        if self._listening:
            await asyncio.wait(self._listening.values())
        for listening in self._listening.values():
            if not listening.cancelled() and listening.exception() is None:
                listening.result().close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _listen(self, inside: int) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._closed:  # it was accepted just before
                writer.close()
                return
            task = asyncio.create_task(self._carry(inside, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        if self._prepare is not None:
            await self._prepare()
        return await asyncio.start_server(connected, LOOPBACK, 0)

    async def _carry(self, inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a connection that fails is closed, which its client sees
        with contextlib.suppress(OSError, ResourceError), contextlib.closing(writer):
            await self._connect(inside, reader, writer)


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()

"""Ports: TCP ports inside a sandbox, within reach of the host though the sandbox has no network.

`PortForwarder` is the host's side, of every backend; `NamespaceSockets` is how bubblewrap's sandboxes are reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.core.errors import ResourceDied, ResourceError

if TYPE_CHECKING:
    from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess

_HOST = "127.0.0.1"
_CHUNK = 64 * 1024
_PATIENCE_S = 10.0
_SOCKET_HELPER = Path(__file__).with_name("sockets_inside.py")


Connect = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Carries one connection to a port inside, until either side ends it."""


class PortForwarder:
    """Listens on the loopback of this host for the ports of a sandbox, one listener for each port inside."""

    def __init__(self, sandbox: str, connect: Connect, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Make one that does not listen yet.

        Args:
            sandbox: its name, for people.
            connect: carries a connection. It is cancelled when the forwarder closes.
            prepare: called before a listener is made; `close` waits for it.
        """
        self._sandbox = sandbox
        self._connect = connect
        self._prepare = prepare
        self._listening: dict[int, asyncio.Task[asyncio.Server]] = {}  # no caller's cancellation cuts them short
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
        """Close every port and connection, those too that are being opened. Safe to call again."""
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
        return await asyncio.start_server(connected, _HOST, 0)

    async def _carry(self, inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a connection that cannot be carried ends, which its caller sees
        with contextlib.suppress(OSError, ResourceError), contextlib.closing(writer):
            await self._connect(inside, reader, writer)


class NamespaceSockets:
    """The ports of a sandbox of bubblewrap.

    A socket belongs to the network in which it was made. A small program joins the sandbox's, and makes there, on
    demand, the sockets by which this process then reaches it.
    """

    def __init__(self, bubble: BubblewrapProcess) -> None:
        """Attach to a sandbox that has been started; nothing is opened yet."""
        self._bubble = bubble
        self._forwarder = PortForwarder(bubble.name, self._pass_on, self._joined)
        self._maker: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def open(self, inside: int) -> tuple[str, int]:
        """See `PortForwarder.open`."""
        if self._bubble.spec.network:
            return _HOST, inside
        return await self._forwarder.open(inside)

    async def close(self) -> None:
        """Close every port and connection."""
        await self._forwarder.close()
        if self._channel is not None and self._maker is not None:
            self._channel.close()  # at which the maker ends
            self._channel = None
            await self._bubble.launcher.run_blocking(_ended, self._maker)

    async def _joined(self) -> None:
        async with self._turn:
            if self._channel is None:
                await self._bubble.launcher.run_blocking(self._join)

    def _join(self) -> None:
        """Start the maker of sockets. Its user is the one that owns the sandbox's namespaces."""
        assert self._bubble.processes is not None
        ours, theirs = socket.socketpair()
        network = -1
        try:
            network = os.open(f"/proc/{self._bubble.processes.init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            owner = self._bubble.launcher.uid
            words = [str(owner if owner is not None else os.geteuid()), str(network)]
            self._maker = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SOCKET_HELPER), *words],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(network,),
                start_new_session=True,
                cwd="/",
                env={},
            )
        except OSError as error:
            ours.close()
            raise ResourceDied(f"The network of the sandbox {self._bubble.name} cannot be joined: {error}") from error
        finally:
            theirs.close()
            if network >= 0:
                os.close(network)
        ours.settimeout(_PATIENCE_S)
        self._channel = ours

    def _socket(self) -> socket.socket:
        """A socket made inside."""
        if self._channel is None:
            raise OSError("the ports are closed")
        self._channel.sendall(b"s")
        answer, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not answer or not descriptors:
            raise OSError("the sandbox's network is gone")
        return socket.socket(fileno=descriptors[0])

    async def _pass_on(self, inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._turn:
            made = await self._bubble.launcher.run_blocking(self._socket)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (_HOST, inside))
            far_reader, far_writer = await asyncio.open_connection(sock=made)
        except BaseException:
            made.close()
            raise
        with contextlib.closing(far_writer):
            await asyncio.gather(copy_stream(reader, far_writer), copy_stream(far_reader, writer))


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _ended(maker: subprocess.Popen[bytes]) -> None:
    try:
        maker.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        maker.kill()
        maker.wait()

"""NamespaceSockets: reaches the TCP ports of a bubblewrap sandbox through sockets made in its network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.core.errors import ResourceDied
from agentfly.resources.containers.port_forwarding import LOOPBACK, PortForwarder, copy_stream

if TYPE_CHECKING:
    from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess

_TIMEOUT_S = 10.0
_SOCKET_HELPER = Path(__file__).with_name("sockets_inside.py")


class NamespaceSockets:
    """The TCP ports of a bubblewrap sandbox.

    A socket belongs to the network namespace in which it was created. A helper program joins the sandbox's namespace
    and creates sockets there on demand. This process uses them to connect to the sandbox.
    """

    def __init__(self, process: BubblewrapProcess) -> None:
        """Attach to a sandbox that has been started; nothing is opened yet."""
        self._process = process
        self._forwarder = PortForwarder(process.name, self._pass_on, self._joined)
        self._helper: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def open(self, inside: int) -> tuple[str, int]:
        """See `PortForwarder.open`."""
        if self._process.spec.network:
            return LOOPBACK, inside
        return await self._forwarder.open(inside)

    async def close(self) -> None:
        """Close every port and connection."""
        await self._forwarder.close()
        if self._channel is not None and self._helper is not None:
            self._channel.close()  # at which the helper exits
            self._channel = None
            await self._process.launcher.run_blocking(_ended, self._helper)

    async def _joined(self) -> None:
        async with self._lock:
            if self._channel is None:
                await self._process.launcher.run_blocking(self._join)

    def _join(self) -> None:
        """Start the helper, as the user that owns the sandbox's namespaces."""
        assert self._process.pid_namespace is not None
        ours, theirs = socket.socketpair()
        network = -1
        try:
            network = os.open(f"/proc/{self._process.pid_namespace.init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            owner = self._process.launcher.uid
            words = [str(owner if owner is not None else os.geteuid()), str(network)]
            self._helper = subprocess.Popen(
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
            raise ResourceDied(f"The network of the sandbox {self._process.name} cannot be joined: {error}") from error
        finally:
            theirs.close()
            if network >= 0:
                os.close(network)
        ours.settimeout(_TIMEOUT_S)
        self._channel = ours

    def _socket(self) -> socket.socket:
        """Return a socket that was created inside."""
        if self._channel is None:
            raise OSError("the ports are closed")
        self._channel.sendall(b"s")
        answer, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not answer or not descriptors:
            raise OSError("the sandbox's network is gone")
        return socket.socket(fileno=descriptors[0])

    async def _pass_on(self, inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._lock:
            made = await self._process.launcher.run_blocking(self._socket)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (LOOPBACK, inside))
            far_reader, far_writer = await asyncio.open_connection(sock=made)
        except BaseException:
            made.close()
            raise
        with contextlib.closing(far_writer):
            await asyncio.gather(copy_stream(reader, far_writer), copy_stream(far_reader, writer))


def _ended(helper: subprocess.Popen[bytes]) -> None:
    try:
        helper.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.wait()

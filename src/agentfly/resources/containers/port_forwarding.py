"""PortForwarder: listens on this host for the TCP ports inside a sandbox, whether that has a network or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentfly.core.errors import ResourceDied, ResourceError

if TYPE_CHECKING:
    from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess
    from agentfly.resources.containers.stream_shell.channels import Stream

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


# Perl, which every Debian has, can close one direction of a connection, as some protocols require. Bash cannot.
_PERL = """
use IO::Socket::INET;
my $far = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $ARGV[0]) or exit 1;
sub pass {
    my ($from, $to) = @_;
    while (sysread($from, my $data, 65536)) {
        my $done = 0;
        while ($done < length $data) { $done += (syswrite($to, $data, length($data) - $done, $done) // return) }
    }
}
my $parent = $$;
if (!(fork // exit 1)) { pass($far, *STDOUT); kill 9, $parent; exit }
pass(*STDIN, $far);
shutdown($far, 1);
wait;
"""
_RELAY = """
command -pv perl >/dev/null && exec perl -e "$2" "$1"
exec 3<>"/dev/tcp/127.0.0.1/$1" || exit
command -p cat <&3 & answers=$!
command -p cat <&0 >&3 & calls=$!
wait -n
for second in {1..30}; do
    kill -0 "$answers" || break
    read -r -t 1 <> <(:)
done
kill "$answers" "$calls"
"""


def relay(open_stream: Callable[[Sequence[str]], Awaitable[Stream]]) -> Connect:
    """Return a function that carries a connection to a port inside, by a program that runs there.

    Args:
        open_stream: runs a program inside.
    """

    async def connect(inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = await open_stream(["/bin/bash", "-c", _RELAY, "bash", str(inside), _PERL])
        copying = asyncio.create_task(_copy_in(reader, stream))
        try:
            await _copy_out(stream, writer)
        finally:
            copying.cancel()
            await stream.close()

    return connect


async def _copy_in(reader: asyncio.StreamReader, stream: Stream) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            await stream.write(chunk)
        await stream.end_input()


async def _copy_out(stream: Stream, writer: asyncio.StreamWriter) -> None:
    while (chunk := await stream.read()) is not None:
        output, data = chunk
        if output == 1:
            writer.write(data)
            await writer.drain()

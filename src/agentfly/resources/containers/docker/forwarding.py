"""Forwarder: a port of this machine that leads to a port inside a container, whether that has a network or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from agentfly.errors import ResourceError
from agentfly.resources.containers.stream_shell.stream import Stream

_CHUNK = 65536
# Perl, which every Debian has, can end one side of a connection, as some protocols want it. Bash cannot.
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


class Forwarder:
    """Listens on the loopback of this machine, and connects each caller by a program that runs inside."""

    def __init__(self, inside: int, open_stream: Callable[[Sequence[str]], Awaitable[Stream]]) -> None:
        """Make one that is not listening yet.

        Args:
            inside: the port inside.
            open_stream: runs a program inside.
        """
        self._inside = inside
        self._open = open_stream
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, on a port that the system chooses."""
        self._server = await asyncio.start_server(self._called, "127.0.0.1", 0)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of this machine."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop listening, and end every call."""
        if self._server is not None:
            self._server.close()
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls))

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            stream = await self._open(["/bin/bash", "-c", _RELAY, "bash", str(self._inside), _PERL])
            asking = asyncio.create_task(_pass_in(reader, stream))
            try:
                await _pass_out(stream, writer)
            finally:
                asking.cancel()
                await stream.close()
        except (OSError, ResourceError, asyncio.CancelledError):
            pass  # the caller sees its connection end
        finally:
            self._calls.discard(call)
            writer.close()


async def _pass_in(reader: asyncio.StreamReader, stream: Stream) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            await stream.write(chunk)
        await stream.end_input()


async def _pass_out(stream: Stream, writer: asyncio.StreamWriter) -> None:
    while (piece := await stream.read()) is not None:
        output, data = piece
        if output == 1:
            writer.write(data)
            await writer.drain()

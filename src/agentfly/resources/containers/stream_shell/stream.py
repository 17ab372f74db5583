"""Stream, the input and outputs of a program in a sandbox, and relay, which carries TCP connections over streams."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from agentfly.resources.containers.port_forwarding import Connect

_CHUNK = 65536
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


class Stream(ABC):
    """The input and outputs of a program, for one reader and any number of writers."""

    @abstractmethod
    async def read(self) -> tuple[int, bytes] | None:
        """Return the output (1 or 2) and the next data on it; None once the program or the connection has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the program's input. The data of one call stays together.

        Raises:
            OSError: the program takes no more input.
        """

    @abstractmethod
    async def end_input(self) -> None:
        """Close the program's input.

        Raises:
            OSError: the program takes no more input.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the input and release the stream. Idempotent."""


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

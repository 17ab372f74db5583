"""Stream: the input and both outputs of a program in a sandbox; relay: connections to ports inside over streams."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from agentfly.resources.containers.port_forwarding import Connect

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


class Stream(ABC):
    """A program's input and outputs, for one reader and any number of writers."""

    @abstractmethod
    async def read(self) -> tuple[int, bytes] | None:
        """What came next, and on which of its outputs: 1 or 2. None once the program, or the way to it, has ended."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Give it input; what is given at once stays together.

        Raises:
            OSError: it takes none any more.
        """

    @abstractmethod
    async def end_input(self) -> None:
        """Have the program find the end of its input.

        Raises:
            OSError: it takes none any more.
        """

    @abstractmethod
    async def close(self) -> None:
        """End its input, and let go of it. Fine if it is closed."""


def relay(open_stream: Callable[[Sequence[str]], Awaitable[Stream]]) -> Connect:
    """What carries connections to ports inside, by a program that runs there for each.

    Args:
        open_stream: runs a program inside.
    """

    async def connect(inside: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = await open_stream(["/bin/bash", "-c", _RELAY, "bash", str(inside), _PERL])
        asking = asyncio.create_task(_copy_in(reader, stream))
        try:
            await _copy_out(stream, writer)
        finally:
            asking.cancel()
            await stream.close()

    return connect


async def _copy_in(reader: asyncio.StreamReader, stream: Stream) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            await stream.write(chunk)
        await stream.end_input()


async def _copy_out(stream: Stream, writer: asyncio.StreamWriter) -> None:
    while (piece := await stream.read()) is not None:
        output, data = piece
        if output == 1:
            writer.write(data)
            await writer.drain()

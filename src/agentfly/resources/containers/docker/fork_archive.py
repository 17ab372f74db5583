"""The files that a sandbox has in memory, as an archive in the image of its fork."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Iterable
from typing import BinaryIO

from agentfly.errors import ResourceError, ToolError
from agentfly.resources.containers.stream_shell.stream import Stream
from agentfly.threads.pool import on_thread

ARCHIVE = ".agentfly.tar"
"""Where the keeper finds it, below the root."""
_LIMIT_S = 120.0
_ROOM = 256 * 2**20  # for names, of which files in memory may have very many
# All processes stand still meanwhile, so that it is of one moment.
_PACK = """
kill -STOP -1
command -p tar -C / --sparse --numeric-owner --one-file-system --exclude=./.agentfly.tar -cf - -- "$@"
code=$?
kill -CONT -1
printf 'ended %s' "$code" >&2
"""


def archive_words(directories: Iterable[str]) -> list[str]:
    """The command line, for root inside, of what writes the archive."""
    return ["/bin/bash", "-c", _PACK, "bash", *(path.lstrip("/") for path in directories)]


async def write_archive(stream: Stream, target: BinaryIO, most: int) -> None:
    """Write to a file what an engine unpacks to `ARCHIVE`, from the stream of `archive_words`.

    Args:
        stream: what the program writes.
        target: the file.
        most: bytes that the directories hold at most.

    Raises:
        ToolError: it is longer than that explains, as where the agent has made very many files.
        ResourceError: it could not be read in full.
    """
    most += _ROOM
    with tempfile.TemporaryFile() as inner:
        said = b""
        try:
            async with asyncio.timeout(_LIMIT_S):
                while (piece := await stream.read()) is not None:
                    output, data = piece
                    if output == 1:
                        await on_thread(inner.write, data)
                        if inner.tell() > most:
                            raise ToolError(
                                f"fork(): the private files of the container take more than {most} bytes to be copied, "
                                "names and all. Remove some."
                            )
                    else:
                        said = (said + data)[-4096:]
        except TimeoutError:
            said += f" (given up after {_LIMIT_S:g} s)".encode()
        finally:
            await stream.close()
        if not said.endswith((b"ended 0", b"ended 1")):  # 1: sockets were left out, which no archive has
            raise ResourceError(
                f"The files of a sandbox could not be copied for its fork: {said.decode(errors='replace')}"
            )
        size = inner.tell()
        inner.seek(0)
        await on_thread(_wrap, inner, size, target)


def _wrap(inner: BinaryIO, size: int, target: BinaryIO) -> None:
    entry = tarfile.TarInfo(ARCHIVE)
    entry.size, entry.mode = size, 0o600
    with tarfile.open(fileobj=target, mode="w") as outer:
        outer.addfile(entry, inner)
    target.seek(0, io.SEEK_SET)

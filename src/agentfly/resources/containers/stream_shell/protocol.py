"""The protocol of a stream shell: requests to its server, reports from it, and the scripts that run inside.

The scripts need bash and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentfly.resources.containers.shell import PRINT_STATE_SCRIPT
from agentfly.resources.containers.spec import SHELL_MOUNT

NO_INPUT = "/dev/null"
_CHUNK = 32 * 1024


def request(
    nonce: str,
    kind: str,
    *,
    number: int = 0,
    argument: object = 0,
    holder: object = 0,
    known: Iterable[int | str] = (),
    stdin: str = NO_INPUT,
    data: bytes = b"",
) -> bytes:
    """Encode one request to the server. The meaning of the fields depends on the kind; see ``server.sh``."""
    fields = (nonce, kind, number, argument, holder, stdin, len(data), *known)
    return " ".join(map(str, fields)).encode() + b"\0" + data


def stdin_chunks(content: bytes) -> Iterator[bytes]:
    """Split input into chunks, escaped for the ``printf '%b'`` of bash, because bash cannot read NUL bytes."""
    for start in range(0, len(content), _CHUNK):
        chunk = content[start : start + _CHUNK]
        yield chunk.replace(b"\\", b"\\\\").replace(b"\0", b"\\0000")


MAX_REPORT_BYTES = 64 * 1024
"""The longest report, which may name thousands of processes. Longer ones are forged."""
_NUMBER = re.compile(r"\d{1,10}")


class ReportSplitter:
    """Separates reports from the other output of a stream, in time linear in the number of bytes."""

    def __init__(self, mark: bytes) -> None:
        """Start with no data.

        Args:
            mark: the bytes with which each report begins. A line feed ends it.
        """
        self._mark = mark
        self._rest = b""

    def split(self, data: bytes) -> Iterator[bytes | list[str]]:
        """Yield the output (bytes) and the reports (words) in the next data. An incomplete report is kept back."""
        data = self._rest + data
        self._rest = b""
        done = 0  # the end of what was yielded
        end, complete = -1, False  # of the line with the mark
        start = data.find(self._mark)
        while start >= 0:
            if end < start:
                end = data.find(b"\n", start)
                complete = end >= 0
                end = end if complete else len(data)
            if end - start >= MAX_REPORT_BYTES:
                start = data.find(self._mark, start + 1)
            elif not complete:
                break
            else:
                if start > done:
                    yield data[done:start]
                done = end + 1
                yield data[start + len(self._mark) : end].decode("ascii", "replace").split(" ")
                start = data.find(self._mark, done)
        kept = start if start >= 0 else max(done, len(data) - _overlap(data, self._mark))
        self._rest = data[kept:]
        if kept > done:
            yield data[done:kept]


def parse_number(word: str) -> int:
    """Parse a number that the shell wrote.

    Raises:
        ValueError: the word is not such a number, so the report is forged.
    """
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{word!r:.40} is not a number")
    return int(word)


def _overlap(data: bytes, mark: bytes) -> int:
    """Return how many bytes at the end of the data may be the start of a mark."""
    start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(data[start:]):
            return len(data) - start
        start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1), start)
    return 0


MARK = b"\x1e%s "
"""The start of a report, with the nonce in it."""
SERVER_COMMAND = ["/bin/bash", "-c", 'IFS= read -r -d "" agentfly_server && eval "$agentfly_server"', "agentfly"]
"""The command line of a server. It reads its script from its input."""


_HOLDER = "printf '@MARK@o %s\\n' \"$$\"; read -r -d ''"
"""Holds its outputs open for commands, until its input ends."""


@dataclass(frozen=True)
class ShellScripts:
    """The scripts of one shell.

    Args:
        nonce: identifies reports and requests of this shell; letters and digits.
        directory: the directory inside for the shell's files.
    """

    nonce: str
    directory: str = str(SHELL_MOUNT)

    @property
    def mark(self) -> bytes:
        """The bytes with which each report begins."""
        return MARK % self.nonce.encode()

    def server(self, drop: Sequence[str] = (), owner: str = "", owned: Sequence[str] = ()) -> bytes:
        """Return the script of the server, to be written to its input first.

        Args:
            drop: a command prefix that drops the privileges that the server has and the agent must not have.
            owner: the owner of the `owned` directories, as ``chown`` takes it; empty to leave it.
            owned: directories that a reset empties. Their owner is kept.
        """
        session, new_process = (
            self._source("print_state", "open_files", "session"),
            self._source("open_files", "new_process"),
        )
        arguments = (session, new_process, owner, "\n".join(owned), *drop)
        return f"set -- {shlex.join(arguments)}\n{self._source('server')}".encode("utf-8", "surrogateescape") + b"\0"

    def holder(self) -> list[str]:
        """Return the command line of a program that holds its outputs open for commands."""
        return ["/bin/bash", "-c", _HOLDER.replace("@MARK@", self._quoted_mark)]

    @property
    def _quoted_mark(self) -> str:
        return f"\\x1e{self.nonce} "

    def _source(self, *names: str) -> str:
        text = "".join(map(_text, names)).replace("@RUN_IN_SESSION@", _text("run_in_session"))
        return (
            text.replace("@MARK@", self._quoted_mark)
            .replace("@NONCE@", self.nonce)
            .replace("@DIRECTORY@", self.directory)
        )


@cache
def _text(name: str) -> str:
    path = PRINT_STATE_SCRIPT if name == PRINT_STATE_SCRIPT.stem else Path(__file__).with_name(f"{name}.sh")
    return path.read_text()

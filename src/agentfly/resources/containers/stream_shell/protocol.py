"""The protocol of a stream shell: requests to its server, reports from it, and the scripts that run inside.

The scripts need bash and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from agentfly.resources.containers.spec import SHELL_MOUNT

NO_INPUT = "/dev/null"
_PIECE = 32 * 1024


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
    """One request. What the fields mean depends on its kind, and is in ``keeper.sh``."""
    fields = (nonce, kind, number, argument, holder, stdin, len(data), *known)
    return " ".join(map(str, fields)).encode() + b"\0" + data


def stdin_chunks(content: bytes) -> Iterator[bytes]:
    """What brings bytes inside, piece by piece: bash reads no NUL, so they are written as its printf has it."""
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        yield piece.replace(b"\\", b"\\\\").replace(b"\0", b"\\0000")


MAX_REPORT_BYTES = 64 * 1024
"""Bytes of a report, which may name thousands of processes. What is longer has been written by somebody else."""
_NUMBER = re.compile(r"\d{1,10}")


class ReportSplitter:
    """Splits one output of a stream at the reports in it, in time that grows with the bytes and with nothing else."""

    def __init__(self, mark: bytes) -> None:
        """Begin.

        Args:
            mark: what each report begins with; a line feed ends it.
        """
        self._mark = mark
        self._rest = b""

    def split(self, data: bytes) -> Iterator[bytes | list[str]]:
        """What came next: bytes that were printed, and the words of reports. What may be half a report is kept back."""
        data = self._rest + data
        self._rest = b""
        done = 0  # up to where it has been given out
        end, complete = -1, False  # of the line that the mark is in
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
    """A number as the shell writes it.

    Raises:
        ValueError: it is something else, which only somebody else can have written.
    """
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{word!r:.40} is no number")
    return int(word)


def _overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of a mark."""
    start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(data[start:]):
            return len(data) - start
        start = data.rfind(mark[:1], max(0, len(data) - len(mark) + 1), start)
    return 0


MARK = b"\x1e%s "
"""What a report begins with; its name in between."""
SERVER_COMMAND = ["/bin/bash", "-c", 'IFS= read -r -d "" keeper && eval "$keeper"', "agentfly"]
"""The command line of a keeper, which is told on its input what to do."""


_HOLDER = "printf '@MARK@o %s\\n' \"$$\"; read -r -d ''"
"""Holds its outputs open for commands, until its input ends."""


@dataclass(frozen=True)
class ShellScripts:
    """The scripts of one shell.

    Args:
        nonce: by which reports and requests of this shell are known; letters and digits.
        directory: the directory, inside, for what belongs to the shell.
    """

    nonce: str
    directory: str = str(SHELL_MOUNT)

    @property
    def mark(self) -> bytes:
        """What each report begins with."""
        return MARK % self.nonce.encode()

    def server(self, drop: Sequence[str] = (), owner: str = "", owned: Sequence[str] = ()) -> bytes:
        """What the keeper is to be told first, on its input.

        Args:
            drop: words before a program that take away the rights that the keeper has and the agent must not have.
            owner: who is to own the `owned` directories, as ``chown`` takes it; empty for nobody.
            owned: directories, emptied by a reset with their owner kept.
        """
        session, new_process = self._source("open_files", "session"), self._source("open_files", "new_process")
        arguments = (session, new_process, owner, "\n".join(owned), *drop)
        return f"set -- {shlex.join(arguments)}\n{self._source('server')}".encode("utf-8", "surrogateescape") + b"\0"

    def holder(self) -> list[str]:
        """The command line of a program that does no more than hold outputs open."""
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
    return files(__package__).joinpath(f"{name}.sh").read_text()

"""Reports: what the shell inside says of itself, told apart from what commands print to the same stream."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 64 * 1024
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
            if end - start >= LONGEST:
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


def number(word: str) -> int:
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

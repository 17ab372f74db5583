"""The log of a program: what it writes, bounded, without its secrets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

_LONGEST_LINE = 2**16


class Log:
    """Writes a log of which the end is kept: two files that take turns, each of at most half the size.

    Args:
        path: the file; what it held before it was full is beside it.
        limit: bytes that both files may take together.
        secrets: texts that are not written. One that breaks over a line of more than 64 KiB is not recognised.
    """

    def __init__(self, path: Path, limit: int, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._limit = limit // 2
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._file = path.open("ab", buffering=0)
        self._line = b""

    def write(self, data: bytes) -> None:
        """Add what the program wrote. Whole lines are written at once, so that no secret is cut in two."""
        lines, newline, self._line = (self._line + data).rpartition(b"\n")
        if len(self._line) > _LONGEST_LINE:
            lines, newline, self._line = lines + newline + self._line, b"", b""
        self._put(lines + newline)

    def close(self) -> None:
        """Write what has been held back, and close the file."""
        self._put(self._line)
        self._line = b""
        self._file.close()

    def _put(self, data: bytes) -> None:
        for secret in self._secrets:
            data = data.replace(secret, b"[secret]")
        while data:
            room = self._limit - self._file.tell()
            if room <= 0:
                self._file.close()
                self._path.replace(_older(self._path))
                self._file = self._path.open("ab", buffering=0)
                room = self._limit
            with contextlib.suppress(OSError):  # a full disk costs the log, not the program
                self._file.write(data[:room])
            data = data[room:]


def tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of a log, from the beginning of a line; empty if there is none."""
    kept = b""
    for part in (path, _older(path)):
        with contextlib.suppress(OSError):
            kept = part.read_bytes() + kept
        if len(kept) > size:
            kept = kept[-size:].partition(b"\n")[2]
            break
    return kept.decode(errors="replace").strip()


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")

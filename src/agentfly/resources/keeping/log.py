"""The log of a program: what it writes, bounded, without its secrets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

_LEAST_LINE = 16  # characters of a line of a secret that is taken for one too


class Log:
    """Writes a log of which the end is kept: two files that take turns, each of at most half the size.

    Args:
        path: the file; what it held before it was full is beside it.
        limit: bytes that both files may take together.
        secrets: texts that are not written, however they come in parts. Of one that has several lines, such as a
            private key, no line is written.
    """

    def __init__(self, path: Path, limit: int, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._limit = limit // 2
        self._secrets = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
        self._file = path.open("ab", buffering=0)
        self._held = b""

    def write(self, data: bytes) -> None:
        """Add what the program wrote. The beginning of a secret is held back until it shows whether it is one."""
        data = self._held + data
        for secret in self._secrets:
            data = data.replace(secret, b"[secret]")
        end = min((_unfinished(data, secret) for secret in self._secrets), default=len(data))
        self._held = data[end:]
        self._put(data[:end])

    def close(self) -> None:
        """Write what has been held back, and close the file."""
        self._put(self._held)
        self._held = b""
        self._file.close()

    def _put(self, data: bytes) -> None:
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


def _forms(secret: str) -> set[bytes]:
    """A secret, and its lines, which a program may write indented or with other ends of lines."""
    lines = (line.strip() for line in secret.splitlines())
    forms = {secret.strip(), *(line for line in lines if len(line) >= _LEAST_LINE)}
    return {form.encode() for form in forms if form}


def _unfinished(data: bytes, secret: bytes) -> int:
    """Where, at the end of some data, a secret begins of which the rest is to come; the data's length if nowhere."""
    at = max(0, len(data) - len(secret) + 1)
    while (at := data.find(secret[:1], at)) >= 0:
        if secret.startswith(data[at:]):
            return at
        at += 1
    return len(data)


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

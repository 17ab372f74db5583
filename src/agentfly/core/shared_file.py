"""Shared files: a small block of bytes shared by the processes of a host.

Reads and writes happen under a lock that ends with its holder. A read returns complete data: the file has two halves,
a write replaces the older one, and a half with a wrong checksum was never finished. This takes microseconds, while
replacing the file can wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from agentfly.core.files import try_lock, unlock

SLOT_BYTES = 2**24
"""Maximum size of the content in bytes. The file is sparse, so unused bytes take no space."""

_HEADER = struct.Struct("<QII")  # number of the writing, length, checksum
_READ_AHEAD = 16 * 2**10


class FileLocked(Exception):
    """Another process has the file just now."""


class LockedFile:
    """The file while it is locked."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._halves = [_read_half(file, half) for half in (0, 1)]

    def read(self) -> bytes:
        """Return the data of the last write; empty before the first."""
        return max(self._halves)[1]

    def write(self, data: bytes) -> None:
        """Replace it.

        Raises:
            OSError: the disk refuses, or it is too much.
        """
        if len(data) > SLOT_BYTES - _HEADER.size:
            raise OSError(f"{len(data)} bytes are more than the {SLOT_BYTES} that are kept")
        number = max(self._halves)[0] + 1
        half = 0 if self._halves[0] < self._halves[1] else 1
        framed = _HEADER.pack(number, len(data), _checksum(number, data)) + data
        if os.pwrite(self._file, framed, half * SLOT_BYTES) != len(framed):
            raise OSError("the disk took a part of it only")
        self._halves[half] = (number, data)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[LockedFile]:
    """Lock a file within the block. Create it if it does not exist.

    Raises:
        FileLocked: another process has it.
        OSError: it cannot be used.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(file):
            raise FileLocked
        if not os.fstat(file).st_nlink:  # it was just removed; the next request creates another one
            raise FileLocked
        yield LockedFile(file)
    finally:
        unlock(file)
        os.close(file)


def remove_stale_files(paths: Iterable[Path], unused_s: float) -> None:
    """Remove the files that were not written for ``unused_s`` seconds, if they can be removed."""
    for path in paths:
        with contextlib.suppress(OSError, FileLocked):
            if time.time() - path.stat().st_mtime > unused_s:
                with lock_file(path):
                    path.unlink()


def _read_half(file: int, half: int) -> tuple[int, bytes]:
    """The number and the data of a half; zero and nothing if it was never finished."""
    start = os.pread(file, _READ_AHEAD, half * SLOT_BYTES)
    if len(start) < _HEADER.size:
        return 0, b""
    number, length, checksum = _HEADER.unpack_from(start)
    if length > SLOT_BYTES - _HEADER.size:
        return 0, b""
    data = start[_HEADER.size : _HEADER.size + length]
    if len(data) < length:
        data += os.pread(file, length - len(data), half * SLOT_BYTES + len(start))
    return (number, data) if _checksum(number, data) == checksum else (0, b"")


def _checksum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)

"""Files that survive crashes and that processes share: atomic replacement, locks, and JSON lines with a torn end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agentfly.core.errors import PrerequisiteError

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.05
"""Seconds between two attempts at a lock that another process holds."""

STALE_DRAFT_S = 3600.0
"""Seconds since the last change after which a draft counts as left by a crash."""

_DRAFT_SUFFIX = ".unfinished"


# --- atomic replacement -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a draft that replaces ``path`` at the end of the block. Readers see the complete old file or the new one.

    If the block fails, the draft is removed and the old file stays. Each draft has its own name, so several processes
    may write a file at the same time: the last replacement counts. A draft that a crash has left is removed by a later
    write of the same file, an hour after its last change.

    Args:
        path: the file.
        mode: its permissions, before the umask.
        durable: whether content and replacement are on the disk when the block ends, so that they survive a power loss.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_DRAFT_SUFFIX}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _remove_stale_drafts(path)
    if durable:
        _sync_directory(path.parent)


def _remove_stale_drafts(path: Path) -> None:
    """Remove drafts of a file that crashed processes have left."""
    with contextlib.suppress(OSError):
        for draft in path.parent.glob(f".{glob.escape(path.name)}.*{_DRAFT_SUFFIX}"):
            if time.time() - draft.stat().st_mtime > STALE_DRAFT_S:
                draft.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Write the names of a directory's files to the disk. Some file systems do not support it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file atomically and durably.

    Raises:
        PrerequisiteError: it cannot be written, for instance because the disk is full. The old file stays.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise PrerequisiteError(
            f"{path} cannot be written: {error.strerror}. It is as it was. Free some space, or make the directory "
            "writable, and call this again."
        ) from error


# --- locks ------------------------------------------------------------------------------------------------------------
# Several files are locked themselves, not by a lock file beside them, and a lock must end with its process and with a
# cancellation. `flock` does all of that.


def try_lock(descriptor: int) -> bool:
    """Lock an open file or directory against other processes; False if another process holds it.

    The lock ends when the descriptor is closed and when the process dies.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock. Closing the descriptor is not enough if a forked process may have a copy of it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still names the open file. It may have been replaced or removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def file_lock(path: Path, *, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path`` during the block, alone among all processes. Wait for it as long as it takes.

    Args:
        path: the lock file. It is created if missing, and is not removed.
        check: called before each attempt; an exception ends the wait.
    """
    with _opened_lock(path) as descriptor:
        check()
        while not try_lock(descriptor):
            time.sleep(LOCK_POLL_S)
            check()
        yield


@contextlib.asynccontextmanager
async def async_file_lock(path: Path) -> AsyncIterator[None]:
    """Hold a lock file during the block, as `file_lock` does, without blocking the event loop."""
    with _opened_lock(path) as descriptor:
        while not try_lock(descriptor):  # noqa: ASYNC110
            await asyncio.sleep(LOCK_POLL_S)
        yield


@contextlib.contextmanager
def _opened_lock(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file.

    An empty list if it is missing. A line that a crash truncated is left out.
    """
    if not path.is_file():
        return []
    values = []
    for line in filter(None, path.read_bytes().split(b"\n")):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # cut, or nested too deeply for any line of ours
            continue
        if isinstance(value, dict):
            values.append(value)
        else:
            logger.warning("%s: a line that is no object is left out: %.60r", path, line)
    return values


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """Append one line to a JSON-lines file, after its last whole line.

    Raises:
        OSError: it cannot be written, for instance because the disk is full.
    """
    append_lines(path, [json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"])


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines, each with its line end, to a JSON-lines file, after its last whole line."""
    mend_last_line(path)
    with path.open("ab") as file:
        for line in lines:
            file.write(line.encode("utf-8"))


def append_or_restore(descriptor: int, data: bytes) -> None:
    """Append to an open file. If the write fails, for instance because the disk is full, the file is as before.

    Raises:
        OSError: the data cannot be written.
    """
    before = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def recover_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that one process appends to, with their numbers from 1.

    At the end, a last line without a line end is removed from the file: its writer died before it was complete.
    """
    with path.open("rb+") as file:
        whole = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield number, line
        file.truncate(whole)


def mend_last_line(path: Path) -> None:
    """Make a JSON-lines file end with a whole line, so that the next line begins on its own line.

    A last line that a crash truncated is removed, with a warning. A last line that lacks only its line end gets one. So
    does a last line that is not the beginning of a JSON object, because the file may hold a user's notes.
    """
    if not path.is_file():
        return
    with path.open("rb+") as file:
        begin = _begin_of_last_line(file)
        file.seek(begin)
        line = file.read()
        if not line:
            return
        if line.startswith(b"{") and not is_whole_line(line):
            logger.warning("%s: the last line was cut by a crash; its %d bytes are removed.", path, len(line))
            file.truncate(begin)
        else:
            file.write(b"\n")


def is_whole_line(line: bytes) -> bool:
    """Whether a line of a JSON-lines file was written to its end: at most its line end is missing."""
    if line.endswith(b"\n"):
        return True
    try:
        json.loads(line)
    except ValueError:
        return False
    except RecursionError:  # nested too deeply to be read, but not truncated
        return True
    return True


def _begin_of_last_line(file: BinaryIO) -> int:
    """Return the position after the last line end."""
    stop = file.seek(0, os.SEEK_END)
    while stop:
        start = max(0, stop - 2**16)
        file.seek(start)
        found = file.read(stop - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0

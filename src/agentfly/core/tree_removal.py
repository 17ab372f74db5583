"""Removal of directories with hostile content, at any depth and with any permissions."""

# directory descriptors need the functions of os, and a tree may have very many entries
# ruff: noqa: PTH101

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_SCANS = 100  # of one directory in which other processes create entries at the same time
_OURS = stat.S_IRWXU


@dataclass
class _DirectoryFrame:
    """A directory on the way down.

    Args:
        name: its name in its parent directory.
        identity: its device and inode.
        ahead: the directories in it that are still to be removed.
        scans: the number of times it has been emptied.
    """

    name: str
    identity: tuple[int, int]
    ahead: list[str]
    scans: int = 0


def remove_tree(path: Path | str) -> None:
    """Remove a file, or a directory with its content. Do nothing if it does not exist or is removed concurrently.

    No symbolic link is followed below ``path``, and no other file system entered. Permissions that its owner could
    change are removed, too. The depth of the tree takes memory, but neither stack nor file descriptors.

    Raises:
        OSError: something of it cannot be removed, or was moved elsewhere meanwhile.
    """
    place = Path(path)
    try:
        above = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_tree_at(above, place.name)
    finally:
        os.close(above)


def remove_tree_at(above: int, name: str) -> None:
    """Do what `remove_tree` does with an entry of an open directory, by its descriptor and a name without a slash.

    Raises:
        OSError: as `remove_tree`.
    """
    if _try_unlink(above, name):
        return
    here = _open_directory(above, name)
    if here is None:
        return
    levels: list[_DirectoryFrame] = []
    try:
        _go_down(here, name, levels, os.fstat(above).st_dev)
        while levels:
            level = levels[-1]
            if level.ahead:
                below = level.ahead.pop()
                entered = _open_directory(here, below)
                if entered is not None:
                    os.close(here)
                    here = entered
                    _go_down(here, below, levels, level.identity[0])
            elif len(levels) == 1:
                if _try_rmdir(above, level):
                    levels.pop()
                else:
                    level.ahead = _remove_files(here, level)
            else:
                here = _go_up(here, levels)
    finally:
        os.close(here)


def _go_down(here: int, name: str, levels: list[_DirectoryFrame], device: int) -> None:
    """Begin with the directory that has just been entered."""
    level = _DirectoryFrame(name, _identity(here), [])
    if level.identity[0] != device:
        raise OSError(errno.EBUSY, "another file system is mounted there", name)
    level.ahead = _remove_files(here, level)
    levels.append(level)


def _go_up(here: int, levels: list[_DirectoryFrame]) -> int:
    """Remove the current, emptied directory, and continue with its parent. Stay if it has new entries."""
    level, upper = levels[-1], levels[-2]
    up = os.open("..", _OPEN, dir_fd=here)
    try:
        if _identity(up) != upper.identity:
            raise OSError(errno.ESTALE, "something in it was moved elsewhere while it was removed", upper.name)
        gone = _try_rmdir(up, level)
    except BaseException:
        os.close(up)
        raise
    if gone:
        levels.pop()
        os.close(here)
        return up
    os.close(up)
    level.ahead = _remove_files(here, level)
    return here


def _try_unlink(above: int, name: str) -> bool:
    """Remove an entry that is not a directory. Return whether it is gone."""
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return True
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise
            return False
    return True


def _open_directory(above: int, name: str) -> int | None:
    """Open a directory, so that its entries can be removed. Return None if it is gone."""
    try:
        try:
            here = os.open(name, _OPEN, dir_fd=above)
        except PermissionError:
            _grant_owner_access(above, name)
            here = os.open(name, _OPEN, dir_fd=above)
    except FileNotFoundError:
        return None
    except OSError:
        if _try_unlink(above, name):  # it has become something else meanwhile
            return None
        raise
    if os.fstat(here).st_mode & _OURS != _OURS:
        with contextlib.suppress(PermissionError):  # of another user; a failed removal reports this later
            os.fchmod(here, _OURS)
    return here


def _grant_owner_access(above: int, name: str) -> None:
    """Let its owner into a directory that not even he may read."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{handle}", _OURS)  # by path, because fchmod does not accept such a descriptor
    finally:
        os.close(handle)


def _remove_files(here: int, level: _DirectoryFrame) -> list[str]:
    """Remove the entries of a directory that are no directories; the names of those that are."""
    level.scans += 1
    if level.scans > _MAX_SCANS:
        raise OSError(errno.ENOTEMPTY, "new files appear in it while it is removed", level.name)
    with os.scandir(here) as entries:
        return [entry.name for entry in entries if not _gone(here, entry)]


def _gone(here: int, entry: os.DirEntry[str]) -> bool:
    return not entry.is_dir(follow_symlinks=False) and _try_unlink(here, entry.name)


def _try_rmdir(up: int, level: _DirectoryFrame) -> bool:
    """Remove an empty directory; False if it is not empty."""
    try:
        os.rmdir(level.name, dir_fd=up)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _identity(directory: int) -> tuple[int, int]:
    found = os.fstat(directory)
    return found.st_dev, found.st_ino

"""MemoryCount: how much memory a sandbox takes, as far as looking at its processes and files shows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from agentfly.resources.processes import private_memory

_INODE = 1024  # bytes that the kernel takes for a file, with its name, however short the file is
_MAPPING = 512  # for a mapping of a process, whether anything is in it or not
_PIPE, _SOCKET = 64 * 1024, 256 * 1024  # what may be in one, which nothing tells
_FREE = 128  # pipes and sockets that a sandbox may have without being charged for more than what is seen
_MANY = 256  # open files for which a process has room; fewer are not looked at one by one
_LOOKS_AT_MAPPINGS = 8  # every so many looks: it takes as long as there are mappings, which take long to make


class MemoryCount:
    """Counts pages of processes and their tables, mappings, private files with their inodes, and pipes and sockets,
    those beyond a few by what they may hold.
    """

    def __init__(self, places: list[str]) -> None:
        """Begin.

        Args:
            places: the directories inside whose file systems hold the private files, in memory.
        """
        self._places = places
        self._looks = 0
        self._mappings: dict[int, int] = {}

    def processes(self, pids: Iterable[int]) -> dict[int, int]:
        """Bytes that each of the processes takes."""
        found = {pid: private_memory(pid) for pid in pids}
        if self._looks % _LOOKS_AT_MAPPINGS == 0:
            self._mappings = {pid: _mappings(pid) for pid in found}
        self._looks += 1
        seen: set[str] = set()
        for pid in found:
            found[pid] += _MAPPING * self._mappings.get(pid, 0)
            found[pid] += _buffers(pid, seen)
        return found

    def files(self, first: int) -> int:
        """Bytes of memory that the private files take.

        Args:
            first: the host's id of process 1.
        """
        taken: dict[int, int] = {}
        for place in self._places:
            path = f"/proc/{first}/root{place}"
            try:
                found = os.statvfs(path)
                device = os.stat(path).st_dev  # noqa: PTH116
            except OSError:  # the sandbox ends
                continue
            blocks, inodes = found.f_blocks - found.f_bfree, found.f_files - found.f_ffree
            taken[device] = blocks * found.f_frsize + inodes * _INODE
        return sum(taken.values())


def _mappings(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def _buffers(pid: int, seen: set[str]) -> int:
    """Bytes that the pipes and sockets of a process may hold, but for those that were seen before and a first few."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        _, _, room = status.partition("\nFDSize:")
        if int(room.split("\n", 1)[0]) < _MANY:
            return 0
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except (OSError, ValueError):
        return 0
    taken = 0
    for number in numbers:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115
        except OSError:
            continue
        kind, _, _ = target.partition(":")
        if kind in ("pipe", "socket") and target not in seen:
            seen.add(target)
            if len(seen) > _FREE:
                taken += _PIPE if kind == "pipe" else _SOCKET
    return taken

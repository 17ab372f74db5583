"""MemoryWatchdog: enforces a sandbox's memory limit where control groups cannot."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess
from agentfly.resources.containers.bubblewrap.shell import PipeShell
from agentfly.resources.process.procfs import descendants, private_memory_bytes

_INODE = 1024  # bytes that the kernel takes for a file, with its name, however short the file is
_MAPPING = 512  # for a mapping of a process, whether anything is in it or not
_PIPE, _SOCKET = 64 * 1024, 256 * 1024  # what may be in one, which nothing tells
_FREE = 128  # pipes and sockets that a sandbox may have without being charged for more than what is seen
_MANY = 256  # open files for which a process has room; fewer are not looked at one by one
_LOOKS_AT_MAPPINGS = 8  # every so many looks: it takes as long as there are mappings, which take long to make


class MemoryUsage:
    """Estimates a sandbox's memory.

    It counts process pages and page tables, mappings, private files and their inodes. Pipes and sockets beyond a few
    count
    at their maximum size.
    """

    def __init__(self, places: list[str]) -> None:
        """Begin.

        Args:
            places: the directories inside whose file systems hold the private files, in memory.
        """
        self._places = places
        self._looks = 0
        self._mappings: dict[int, int] = {}

    def process_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Bytes that each of the processes takes."""
        found = {pid: private_memory_bytes(pid) for pid in pids}
        if self._looks % _LOOKS_AT_MAPPINGS == 0:
            self._mappings = {pid: _mappings(pid) for pid in found}
        self._looks += 1
        seen: set[str] = set()
        for pid in found:
            found[pid] += _MAPPING * self._mappings.get(pid, 0)
            found[pid] += _buffers(pid, seen)
        return found

    def file_bytes(self, first: int) -> int:
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


_PERIOD_S = 0.25
_OF_A_SHELL = 32 * 2**20  # what a keeper of the shell may take before it counts among the largest


class MemoryWatchdog:
    """Looks at the memory of a sandbox's processes and private files four times a second.

    When they take more than the limit together, the largest processes are killed until what is left fits. A single
    process cannot outrun it, for the shell has set a limit on what each may allocate; nor can files, which have a limit
    of their own that is lower. What no look shows, such as files in memory that have no name, the filter of system
    calls refuses. What is left is in `capabilities.NOT_COUNTED`.
    """

    def __init__(self, bubble: BubblewrapProcess, shell: PipeShell) -> None:
        """Begin to watch a sandbox that has been started."""
        assert bubble.processes is not None
        self.kills = 0
        self._bubble = bubble
        self._shell = shell
        self._processes = bubble.processes
        self._count = MemoryUsage(bubble.launcher.private_mounts(bubble.spec))
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while not self._bubble.exited.is_set():
            await self._bubble.launcher.run_blocking(self._look, self._shell.shell_pids)
            await asyncio.sleep(_PERIOD_S)

    def _look(self, keepers: set[int]) -> None:
        first = self._processes.init_pid
        memory = self._count.process_bytes(descendants(first))
        excess = self._count.file_bytes(first) + sum(memory.values()) - self._bubble.spec.memory_limit
        for keeper in keepers & memory.keys():
            memory[keeper] -= _OF_A_SHELL
        for pid in sorted(memory, key=lambda pid: memory[pid], reverse=True):
            if excess <= 0 or memory[pid] <= 0:
                break
            self.kills += self._processes.signal(pid, signal.SIGKILL)
            excess -= memory[pid]

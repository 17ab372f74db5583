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

_INODE = 1024  # bytes of kernel memory per file, with its name, however short the file is
_MAPPING = 512  # bytes of kernel memory per mapping of a process, even an empty one
_PIPE, _SOCKET = 64 * 1024, 256 * 1024  # bytes that one may buffer; the kernel does not report how many it does
_FREE = 128  # pipes and sockets of a sandbox that are not counted
_MANY = 256  # size of a descriptor table; those of smaller tables are not inspected
_MAPPINGS_PERIOD = 8  # mappings are counted at every eighth look, because counting takes time for each


class MemoryUsage:
    """Estimates a sandbox's memory.

    It counts process pages and page tables, mappings, private files and their inodes. Pipes and sockets beyond the
    first 128 count at their maximum size.
    """

    def __init__(self, directories: list[str]) -> None:
        """Start with no measurement.

        Args:
            directories: directories inside whose file systems hold the private files, in memory.
        """
        self._directories = directories
        self._looks = 0
        self._mappings: dict[int, int] = {}

    def process_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Return the bytes of each process."""
        found = {pid: private_memory_bytes(pid) for pid in pids}
        if self._looks % _MAPPINGS_PERIOD == 0:
            self._mappings = {pid: _mappings(pid) for pid in found}
        self._looks += 1
        seen: set[str] = set()
        for pid in found:
            found[pid] += _MAPPING * self._mappings.get(pid, 0)
            found[pid] += _buffers(pid, seen)
        return found

    def file_bytes(self, init_pid: int) -> int:
        """Return the bytes of memory of the private files.

        Args:
            init_pid: the host's process id of process 1.
        """
        taken: dict[int, int] = {}
        for directory in self._directories:
            path = f"/proc/{init_pid}/root{directory}"
            try:
                found = os.statvfs(path)
                device = os.stat(path).st_dev  # noqa: PTH116
            except OSError:  # the sandbox is ending
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
    """Return the bytes that the pipes and sockets of a process may buffer, beyond `seen` and the first 128."""
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
_SHELL_ALLOWANCE = 32 * 2**20  # bytes of a process of the shell that do not count when processes are chosen


class MemoryWatchdog:
    """Checks the memory of a sandbox's processes and private files four times a second.

    If their sum exceeds the limit, the largest processes are killed until the rest fits. A single process cannot grow
    past the limit between two checks, because the shell has limited what each process may allocate. Files have a lower
    limit of their own. The system call filter refuses memory that cannot be observed, such as unnamed files in memory.
    `launcher.NOT_COUNTED` lists what remains uncounted.
    """

    def __init__(self, process: BubblewrapProcess, shell: PipeShell) -> None:
        """Start to watch a sandbox that has been started."""
        assert process.pid_namespace is not None
        self.kills = 0
        self._process = process
        self._shell = shell
        self._processes = process.pid_namespace
        self._count = MemoryUsage(process.launcher.private_mounts(process.spec))
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while not self._process.exited.is_set():
            await self._process.launcher.run_blocking(self._look, self._shell.shell_pids)
            await asyncio.sleep(_PERIOD_S)

    def _look(self, shell_pids: set[int]) -> None:
        init_pid = self._processes.init_pid
        memory = self._count.process_bytes(descendants(init_pid))
        excess = self._count.file_bytes(init_pid) + sum(memory.values()) - self._process.spec.memory_limit
        for pid in shell_pids & memory.keys():
            memory[pid] -= _SHELL_ALLOWANCE
        for pid in sorted(memory, key=lambda pid: memory[pid], reverse=True):
            if excess <= 0 or memory[pid] <= 0:
                break
            self.kills += self._processes.signal(pid, signal.SIGKILL)
            excess -= memory[pid]

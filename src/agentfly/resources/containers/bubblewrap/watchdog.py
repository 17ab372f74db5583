"""MemoryWatchdog: holds a sandbox to its memory limit where control groups cannot."""

from __future__ import annotations

import asyncio
import signal

from agentfly.resources.containers.bubblewrap.bubble import Bubble
from agentfly.resources.containers.bubblewrap.memory_count import MemoryCount
from agentfly.resources.containers.bubblewrap.shell import Shell
from agentfly.resources.processes import descendants

_PERIOD_S = 0.25
_OF_A_SHELL = 32 * 2**20  # what a keeper of the shell may take before it counts among the largest


class MemoryWatchdog:
    """Looks at the memory of a sandbox's processes and private files four times a second.

    When they take more than the limit together, the largest processes are killed until what is left fits. A single
    process cannot outrun it, for the shell has set a limit on what each may allocate; nor can files, which have a limit
    of their own that is lower. What no look shows, such as files in memory that have no name, the filter of system
    calls refuses. What is left is in `capabilities.NOT_COUNTED`.
    """

    def __init__(self, bubble: Bubble, shell: Shell) -> None:
        """Begin to watch a sandbox that has been started."""
        assert bubble.processes is not None
        self.kills = 0
        self._bubble = bubble
        self._shell = shell
        self._processes = bubble.processes
        self._count = MemoryCount(bubble.launcher.file_systems(bubble.spec))
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while not self._bubble.ended.is_set():
            await self._bubble.launcher.aside(self._look, self._shell.keepers)
            await asyncio.sleep(_PERIOD_S)

    def _look(self, keepers: set[int]) -> None:
        first = self._processes.first
        memory = self._count.processes(descendants(first))
        excess = self._count.files(first) + sum(memory.values()) - self._bubble.spec.memory_limit
        for keeper in keepers & memory.keys():
            memory[keeper] -= _OF_A_SHELL
        for pid in sorted(memory, key=lambda pid: memory[pid], reverse=True):
            if excess <= 0 or memory[pid] <= 0:
                break
            self.kills += self._processes.signal(pid, signal.SIGKILL)
            excess -= memory[pid]

"""MemoryWatchdog: holds the processes of a sandbox to their memory limit together, where control groups cannot."""

from __future__ import annotations

import asyncio
import signal

from agentfly.resources.containers.processes import descendants, private_memory
from agentfly.resources.containers.sandbox import Sandbox

_PERIOD_S = 0.25


class MemoryWatchdog:
    """Looks at the memory of a sandbox's processes four times a second, and kills the largest when it is too much.

    A single process cannot outrun it: the shell has set a limit on what each may allocate.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        """Begin to watch a sandbox that has been started."""
        assert sandbox.processes is not None
        self.kills = 0
        self._sandbox = sandbox
        self._processes = sandbox.processes
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while not self._sandbox.ended.is_set():
            await self._sandbox.launcher.aside(self._look)
            await asyncio.sleep(_PERIOD_S)

    def _look(self) -> None:
        memory = {pid: private_memory(pid) for pid in descendants(self._processes.first)}
        if sum(memory.values()) > self._sandbox.spec.memory_limit:
            largest = max(memory, key=lambda pid: memory[pid])
            self.kills += self._processes.signal(largest, signal.SIGKILL)

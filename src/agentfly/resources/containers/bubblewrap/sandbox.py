"""BubblewrapSandbox: a bubble, the shell in it, and what watches its memory."""

from __future__ import annotations

from dataclasses import replace

from agentfly.errors import ResourceDied, ResourceStartError
from agentfly.resources.containers.bubblewrap.bubble import Bubble
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.shell import Shell
from agentfly.resources.containers.bubblewrap.watchdog import MemoryWatchdog
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.sandbox import Sandbox
from agentfly.resources.containers.spec import ContainerSpec


class BubblewrapSandbox(Sandbox):
    """A sandbox of bubblewrap."""

    def __init__(self, launcher: Launcher, spec: ContainerSpec, instance: str) -> None:
        """Make a handle; nothing is started yet."""
        super().__init__(spec, instance)
        self._launcher = launcher
        self.bubble: Bubble | None = None
        self.shell: Shell | None = None
        self._watchdog: MemoryWatchdog | None = None

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self.bubble = Bubble(self._launcher, self.spec, self.instance)
        await self.bubble.start()
        self.shell = Shell(self.bubble)
        if self.bubble.cgroup is None:
            self._watchdog = MemoryWatchdog(self.bubble, self.shell)
        try:
            await self.shell.ready()
        except ResourceDied:
            raise ResourceStartError(
                f"The shell of the sandbox {self.instance} ended before it was ready: {self.bubble.complaint()}"
            ) from None

    async def end(self) -> None:
        """See `Sandbox.end`."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self.shell is not None:
            self.shell.close()
        if self.bubble is not None:
            await self.bubble.end()
        self._watchdog = self.shell = self.bubble = None

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return self.shell is not None and not self.shell.dead

    async def run(self, command: Command, timeout: float) -> Outcome:
        """See `Sandbox.run`."""
        if self.shell is None:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        kills = self._memory_kills()
        outcome = await self.shell.run(command, timeout)
        if self._memory_kills() > kills:
            return replace(outcome, out_of_memory=True)
        return outcome

    def _memory_kills(self) -> int:
        if self._watchdog is not None:
            return self._watchdog.kills
        bubble = self.bubble
        return bubble.cgroup.out_of_memory_kills() if bubble is not None and bubble.cgroup is not None else 0

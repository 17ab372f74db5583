"""Life: a sandbox from one start or reset to the next: a bubble, the shell in it, and what watches its memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agentfly.errors import ResourceDied, ResourceStartError
from agentfly.resources.cgroups import KillCounter
from agentfly.resources.containers.bubblewrap.bubble import Bubble
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.ports import Ports
from agentfly.resources.containers.bubblewrap.shell import Shell
from agentfly.resources.containers.bubblewrap.watchdog import MemoryWatchdog
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.spec import ContainerSpec


class Life:
    """Everything of a sandbox that a reset does away with."""

    def __init__(self, launcher: Launcher, spec: ContainerSpec, scratch: Path) -> None:
        """Make a handle; nothing is started yet."""
        self.bubble = Bubble(launcher, spec, scratch)
        self.shell: Shell | None = None
        self._watchdog: MemoryWatchdog | None = None
        self._kills: KillCounter | None = None
        self._ports: Ports | None = None

    async def begin(self) -> None:
        """Bring it up. It may fail or be cancelled at any point; `end` then removes whatever had been made.

        Raises:
            ResourceStartError: it did not come up.
        """
        await self.bubble.start()
        self.shell = Shell(self.bubble)
        if self.bubble.cgroup is None:
            self._watchdog = MemoryWatchdog(self.bubble, self.shell)
        else:
            self._kills = KillCounter(self.bubble.cgroup)
        try:
            await self.shell.ready()
        except ResourceDied:
            raise ResourceStartError(
                f"The shell of the sandbox {self.bubble.name} ended before it was ready: {self.bubble.complaint()}"
            ) from None

    async def end(self) -> None:
        """Kill every process and remove every trace; return when all are gone. Safe to call again, and at any time.

        Raises:
            OSError: something of it cannot be removed.
        """
        if self._watchdog is not None:
            self._watchdog.close()
        if self._kills is not None:
            self._kills.close()
        if self._ports is not None:
            await self._ports.close()
        if self.shell is not None:
            self.shell.close()
        await self.bubble.end()

    @property
    def alive(self) -> bool:
        """Whether it takes commands, or was ended for what its processes did."""
        if self.shell is None:
            return False
        return self.shell.own_doing is not None or not (self.shell.dead or self.bubble.has_exited)

    async def run(self, command: Command, timeout: float) -> Outcome:
        """See `Sandbox.run`."""
        assert self.shell is not None
        kills = self._memory_kills()
        outcome = await self.shell.run(command, timeout)
        if outcome.exit_code and self._memory_kills() > kills:
            return replace(outcome, out_of_memory=True)
        return outcome

    async def freeze(self) -> None:
        """Stop every process, and the clocks of the commands under way."""
        assert self.shell is not None
        if self.shell.own_doing is not None:
            return
        await self.shell.pause()
        await self.bubble.freeze()

    async def thaw(self) -> None:
        """Let every process go on."""
        assert self.shell is not None
        if self.shell.own_doing is not None:
            return
        try:
            await self.bubble.thaw()
        finally:
            self.shell.resume()

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        assert self.shell is not None
        self.shell.check()
        if self._ports is None:
            self._ports = Ports(self.bubble)
        return await self._ports.open(inside)

    def _memory_kills(self) -> int:
        if self._watchdog is not None:
            return self._watchdog.kills
        return self._kills.kills() if self._kills is not None else 0

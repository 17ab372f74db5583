"""BubblewrapSandbox: a sandbox of bubblewrap, as a sequence of generations, one per start or reset.

A reset never reuses a process or a namespace. The agent may have changed the memory of process 1, and IPC namespaces
keep shared memory and queues.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from agentfly.core.errors import ResourceDied, ResourceStartError
from agentfly.resources.containers.backend import Sandbox
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.memory_watchdog import MemoryWatchdog
from agentfly.resources.containers.bubblewrap.process import BubblewrapProcess
from agentfly.resources.containers.bubblewrap.shell import PipeShell
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.port_forwarding import NamespaceSockets
from agentfly.resources.containers.spec import ContainerSpec, SnapshotImage
from agentfly.resources.process.cgroups import OOMKillCounter


class SandboxGeneration:
    """Everything in a sandbox that a reset replaces."""

    def __init__(self, launcher: Launcher, spec: ContainerSpec, scratch: Path) -> None:
        """Create a handle; nothing is started yet."""
        self.process = BubblewrapProcess(launcher, spec, scratch)
        self.shell: PipeShell | None = None
        self._watchdog: MemoryWatchdog | None = None
        self._kills: OOMKillCounter | None = None
        self._ports: NamespaceSockets | None = None

    async def start(self) -> None:
        """Start the sandbox. This may fail or be cancelled at any point; `stop` then removes what was created.

        Raises:
            ResourceStartError: the sandbox did not start.
        """
        await self.process.start()
        self.shell = PipeShell(self.process)
        if self.process.cgroup is None:
            self._watchdog = MemoryWatchdog(self.process, self.shell)
        else:
            self._kills = OOMKillCounter(self.process.cgroup)
        try:
            await self.shell.ready()
        except ResourceDied:
            raise ResourceStartError(
                f"The shell of the sandbox {self.process.name} ended before it was ready: {self.process.startup_log()}"
            ) from None

    async def stop(self) -> None:
        """Kill every process, remove all resources, and return when they are gone. Idempotent.

        Raises:
            OSError: a resource cannot be removed.
        """
        if self._watchdog is not None:
            self._watchdog.close()
        if self._kills is not None:
            self._kills.close()
        if self._ports is not None:
            await self._ports.close()
        if self.shell is not None:
            self.shell.close()
        await self.process.stop()

    @property
    def alive(self) -> bool:
        """Whether it takes commands, or was stopped for what its own processes did."""
        if self.shell is None:
            return False
        return self.shell.own_doing is not None or not (self.shell.dead or self.process.has_exited)

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """See `Sandbox.run`."""
        assert self.shell is not None
        kills = self._memory_kills()
        outcome = await self.shell.run(command, timeout)
        if outcome.exit_code and self._memory_kills() > kills:
            return replace(outcome, out_of_memory=True)
        return outcome

    async def freeze(self) -> None:
        """Stop every process, and the clocks of pending commands."""
        assert self.shell is not None
        if self.shell.own_doing is not None:
            return
        await self.shell.pause()
        await self.process.freeze()

    async def thaw(self) -> None:
        """Resume every process."""
        assert self.shell is not None
        if self.shell.own_doing is not None:
            return
        try:
            await self.process.thaw()
        finally:
            self.shell.resume()

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        assert self.shell is not None
        self.shell.check()
        if self._ports is None:
            self._ports = NamespaceSockets(self.process)
        return await self._ports.open(inside)

    def _memory_kills(self) -> int:
        if self._watchdog is not None:
            return self._watchdog.kills
        return self._kills.kills() if self._kills is not None else 0


class BubblewrapSandbox(Sandbox):
    """A sandbox of bubblewrap. Each reset starts a new generation, which shares nothing with the previous one.

    Resets are quick because, after the first one, the next generation is started in advance.
    """

    def __init__(self, launcher: Launcher, spec: ContainerSpec, instance: str) -> None:
        """Create a handle; nothing is started yet."""
        super().__init__(spec, instance)
        self._launcher = launcher
        self._home = launcher.instance_directory(instance)
        self._generation_count = 0
        self._generations: list[SandboxGeneration] = []  # that are not removed yet
        self._generation: SandboxGeneration | None = None
        self._standby: asyncio.Task[SandboxGeneration | None] | None = None

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self._generation = await self._begin()

    async def reset(self) -> None:
        """See `Sandbox.reset`."""
        old, self._generation = self._generation, None
        ended, begun = await asyncio.gather(self._end(old), self._next_generation(), return_exceptions=True)
        for failure in (ended, begun):
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(begun, SandboxGeneration)
        self._generation = begun
        if self._standby is None:
            self._standby = asyncio.create_task(self._prepare_standby())

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        self._generation = None
        if self._standby is not None:
            self._standby.cancel()
            await asyncio.wait({self._standby})
            self._standby = None
        ends = await asyncio.gather(*map(self._end, self._generations), return_exceptions=True)
        for failure in ends:
            if isinstance(failure, BaseException):
                raise failure
        if self._generation_count:
            self._launcher.remove_instance_directory(self._home)

    @property
    def process(self) -> BubblewrapProcess | None:
        """The bubblewrap process of the current generation."""
        return self._generation.process if self._generation is not None else None

    @property
    def shell(self) -> PipeShell | None:
        """The shell of the current generation."""
        return self._generation.shell if self._generation is not None else None

    @property
    def workdir(self) -> str:
        """See `Sandbox.workdir`."""
        return (
            self._launcher.workdir(self.spec, self._generation.process.scratch)
            if self._generation
            else self.spec.workdir
        )

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return self._generation is not None and self._generation.alive

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """See `Sandbox.run`."""
        return await self._require_generation().run(command, timeout)

    async def freeze(self) -> None:
        """See `Sandbox.freeze`."""
        await self._require_generation().freeze()

    async def thaw(self) -> None:
        """See `Sandbox.thaw`."""
        await self._require_generation().thaw()

    async def fork(self) -> SnapshotImage:
        """See `Sandbox.fork`."""
        generation = self._require_generation()
        assert generation.shell is not None
        generation.shell.check()
        frozen = generation.process.frozen
        try:
            await generation.freeze()
            return await self._launcher.snapshot(generation.process.scratch, self.spec, generation.process.image)
        finally:
            if not frozen:
                await generation.thaw()

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        return await self._require_generation().port(inside)

    def _require_generation(self) -> SandboxGeneration:
        if self._generation is None:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        return self._generation

    async def _begin(self) -> SandboxGeneration:
        generation = SandboxGeneration(self._launcher, self.spec, self._home / str(self._generation_count))
        self._generation_count += 1
        self._generations.append(generation)
        await generation.start()
        return generation

    async def _end(self, generation: SandboxGeneration | None) -> None:
        if generation is not None:
            await generation.stop()
            if generation in self._generations:
                self._generations.remove(generation)

    async def _next_generation(self) -> SandboxGeneration:
        """The generation that was started in advance, or a new one."""
        ready, self._standby = self._standby, None
        generation = await ready if ready is not None else None
        if generation is not None and generation.alive:
            return generation
        await self._end(generation)
        return await self._begin()

    async def _prepare_standby(self) -> SandboxGeneration | None:
        """Start the next generation in advance; None if that fails, because the next reset then reports the failure."""
        try:
            return await self._begin()
        except Exception:
            await self._end(self._generations[-1])
            return None

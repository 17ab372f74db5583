"""BubblewrapSandbox: a sandbox of bubblewrap, through its lives."""

from __future__ import annotations

import asyncio

from agentfly.errors import ResourceDied
from agentfly.resources.containers.bubblewrap.bubble import Bubble
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.life import Life
from agentfly.resources.containers.bubblewrap.shell import Shell
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.sandbox import Sandbox
from agentfly.resources.containers.snapshot import SnapshotImage
from agentfly.resources.containers.spec import ContainerSpec


class BubblewrapSandbox(Sandbox):
    """A sandbox of bubblewrap. A reset gives it a new life, of which nothing is shared with the one before.

    Nothing of a life can serve the next: its process 1 belongs to the user who ran in it, who may have changed its
    memory; its namespaces keep what processes leave in them. What makes a reset quick is that, from the second on, the
    next life stands ready.
    """

    def __init__(self, launcher: Launcher, spec: ContainerSpec, instance: str) -> None:
        """Make a handle; nothing is started yet."""
        super().__init__(spec, instance)
        self._launcher = launcher
        self._home = launcher.scratch(instance)
        self._begun = 0  # lives
        self._lives: list[Life] = []  # of which something may be left
        self._life: Life | None = None
        self._next: asyncio.Task[Life | None] | None = None

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self._life = await self._begin()

    async def reset(self) -> None:
        """See `Sandbox.reset`."""
        old, self._life = self._life, None
        ended, begun = await asyncio.gather(self._end(old), self._successor(), return_exceptions=True)
        for failure in (ended, begun):
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(begun, Life)
        self._life = begun
        if self._next is None:
            self._next = asyncio.create_task(self._stand_ready())

    async def end(self) -> None:
        """See `Sandbox.end`."""
        self._life = None
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            self._next = None
        ends = await asyncio.gather(*map(self._end, self._lives), return_exceptions=True)
        for failure in ends:
            if isinstance(failure, BaseException):
                raise failure
        if self._begun:
            self._launcher.remove_home(self._home)

    @property
    def bubble(self) -> Bubble | None:
        """The bubble of the present life."""
        return self._life.bubble if self._life is not None else None

    @property
    def shell(self) -> Shell | None:
        """The shell of the present life."""
        return self._life.shell if self._life is not None else None

    @property
    def workdir(self) -> str:
        """See `Sandbox.workdir`."""
        return self._launcher.workdir(self.spec, self._life.bubble.scratch) if self._life else self.spec.workdir

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return self._life is not None and self._life.alive

    async def run(self, command: Command, timeout: float) -> Outcome:
        """See `Sandbox.run`."""
        return await self._present().run(command, timeout)

    async def freeze(self) -> None:
        """See `Sandbox.freeze`."""
        await self._present().freeze()

    async def thaw(self) -> None:
        """See `Sandbox.thaw`."""
        await self._present().thaw()

    async def fork(self) -> SnapshotImage:
        """See `Sandbox.fork`."""
        life = self._present()
        assert life.shell is not None
        life.shell.check()
        frozen = life.bubble.frozen
        try:
            await life.freeze()
            return await self._launcher.snapshot(life.bubble.scratch, self.spec, life.bubble.image)
        finally:
            if not frozen:
                await life.thaw()

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        return await self._present().port(inside)

    def _present(self) -> Life:
        if self._life is None:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        return self._life

    async def _begin(self) -> Life:
        life = Life(self._launcher, self.spec, self._home / str(self._begun))
        self._begun += 1
        self._lives.append(life)
        await life.begin()
        return life

    async def _end(self, life: Life | None) -> None:
        if life is not None:
            await life.end()
            if life in self._lives:
                self._lives.remove(life)

    async def _successor(self) -> Life:
        """The life that stands ready, if it does; else a new one."""
        ready, self._next = self._next, None
        life = await ready if ready is not None else None
        if life is not None and life.alive:
            return life
        await self._end(life)
        return await self._begin()

    async def _stand_ready(self) -> Life | None:
        """Begin the next life; None if that fails, as the reset which needs it will find out for itself."""
        try:
            return await self._begin()
        except Exception:
            await self._end(self._lives[-1])
            return None

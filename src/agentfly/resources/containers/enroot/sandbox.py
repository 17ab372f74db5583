"""EnrootSandbox: a container of enroot, and the shell in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace

from agentfly.core.errors import ResourceDied, ResourceError, ResourceStartError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.containers.backend import Sandbox
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.enroot.images import EnrootImage
from agentfly.resources.containers.enroot.namespaces import READY
from agentfly.resources.containers.enroot.plan import EnrootDirectory
from agentfly.resources.containers.enroot.program import ProcessStream, run_namespaces_program
from agentfly.resources.containers.port_forwarding import PortForwarder
from agentfly.resources.containers.runtime_directory import remove_sandbox_directory
from agentfly.resources.containers.sandbox_processes import InitProcess, kill_with_children
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell.protocol import SERVER_COMMAND, ShellScripts
from agentfly.resources.containers.stream_shell.shell import StreamShell
from agentfly.resources.containers.stream_shell.stream import relay
from agentfly.resources.process.cgroups import Cgroup, CgroupParent

_START_PATIENCE_S = 60.0
_END_PATIENCE_S = 20.0
_EXIT_PATIENCE_S = 2.0
_WORDS = 4000  # bytes kept of what enroot says


class EnrootSandbox(Sandbox):
    """A sandbox of enroot.

    Process 1 is the server of its shell. It has entered the root that enroot made. It has no capability, and a filter
    of system calls, like all processes inside. When process 1 ends, the kernel kills all others. A reset ends the
    sandbox and starts it again.
    """

    def __init__(
        self, spec: ContainerSpec, instance: str, *, program: str, image: EnrootImage, cgroups: CgroupParent | None
    ) -> None:
        """Make a handle; nothing is started yet.

        Args:
            spec: what to start.
            instance: its name, unique on the machine.
            program: the path of enroot.
            image: what it is laid over.
            cgroups: where control groups can be made; None if nowhere.
        """
        super().__init__(spec, instance)
        self._program, self._image = program, image
        self._place = EnrootDirectory(spec, instance)
        home = cgroups
        self._cgroup: Cgroup | None = home.cgroup(f"agentfly-{instance}", cpus=spec.cpus) if home else None
        self._begun = False
        self._launching: asyncio.Future[ProcessStream] | None = None
        self._launched: ProcessStream | None = None
        self._first = 0  # the host's id of process 1
        self._said = b""
        self._shell: StreamShell | None = None
        self._ports = self._new_ports()
        self._frozen = False

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self._begun, self._said, self._frozen = True, b"", False
        self._ports = self._new_ports()
        try:
            await run_in_thread(self._create_directory)
            async with asyncio.timeout(_START_PATIENCE_S):
                launched = await self._launch()
                scripts = ShellScripts(secrets.token_hex(12))
                self._shell = StreamShell(
                    launched,
                    scripts,
                    self._open,
                    workdir=self.spec.workdir,
                    describe_end=self._describe_end,
                )
                await self._shell.start(scripts.server(self._place.limit_command))
        except TimeoutError:
            raise ResourceStartError(
                f"The sandbox {self.instance} was not up within {_START_PATIENCE_S:g} s. {self._enroot_output()}"
            ) from None
        except (OSError, ResourceDied) as error:
            raise ResourceStartError(
                f"The sandbox {self.instance} did not come up: {error}. {self._enroot_output()}"
            ) from error

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        await self._ports.close()
        if self._launching is not None and self._launched is None:
            with contextlib.suppress(OSError):
                self._launched = await self._launching
        self._launching = None
        if self._cgroup is not None and self._frozen:
            await run_in_thread(self._cgroup.thaw)
            self._frozen = False
        if self._launched is not None:
            await self._kill(self._launched)
        if self._shell is not None:
            await self._shell.close()
            self._shell = None
        if self._launched is not None:
            await self._launched.close()
            self._launched = None
        if self._begun:
            await run_in_thread(self._remove)

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return self._shell is not None and (self._shell.own_doing is not None or not self._shell.dead)

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """See `Sandbox.run`."""
        if self._shell is None:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        if self._cgroup is None:
            return await self._shell.run(command, timeout)
        before = self._cgroup.oom_kills()
        outcome = await self._shell.run(command, timeout)
        return replace(outcome, out_of_memory=self._cgroup.oom_kills() > before)

    async def freeze(self) -> None:
        """See `Sandbox.freeze`."""
        if self._cgroup is None or self._shell is None:
            raise self._unsupported("freeze")
        if not self._frozen:
            self._frozen = True
            await self._shell.pause()
            await run_in_thread(self._cgroup.freeze)

    async def thaw(self) -> None:
        """See `Sandbox.thaw`."""
        if self._frozen and self._cgroup is not None:
            await run_in_thread(self._cgroup.thaw)
            self._frozen = False
            if self._shell is not None:
                self._shell.resume()

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        return await self._ports.open(inside)

    # --- bringing up ------------------------------------------------------------------------------------------------

    def _create_directory(self) -> None:
        if self._cgroup is not None:
            spec = self.spec
            self._cgroup.create(memory=spec.memory_limit, pids=self._place.pids, cpus=spec.cpus)
        self._place.create(self._cgroup)

    async def _launch(self) -> ProcessStream:
        """Bring process 1 up; its stream."""
        plan = self._place.make_plan(self._program, SERVER_COMMAND, self._image, self._cgroup)
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            made = run_namespaces_program("make", self._place.path, plan, plan["enroot_environment"], [write])
            self._launching = asyncio.ensure_future(made)
            self._launched = launched = await asyncio.shield(self._launching)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        try:
            self._first = int(await run_in_thread(os.read, read, 32) or b"0")
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is told below
                InitProcess.of(self._first).save(self._place.path)
        finally:
            os.close(read)
        printed = b""
        while READY not in printed:
            piece = await launched.read()
            if piece is None:
                raise ResourceDied("it ended")
            output, data = piece
            if output == 1:
                printed += data
            else:
                self._said = (self._said + data)[-_WORDS:]
        return launched

    def _new_ports(self) -> PortForwarder:
        return PortForwarder(self.instance, relay(self._open))

    async def _open(self, words: Sequence[str]) -> ProcessStream:
        """Run a program inside with a stream."""
        if self._launched is None or not self._first:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        plan = self._place.join_plan(self._launched.process.pid, self._first, words, self._image, self._cgroup)
        try:
            return await run_namespaces_program("join", self._place.path, plan, {})
        except OSError as error:
            raise ResourceError(f"A program could not be run in the sandbox {self.instance}: {error}") from error

    # --- ending -----------------------------------------------------------------------------------------------------

    async def _kill(self, launched: ProcessStream) -> None:
        if launched.process.returncode is None:
            kill_with_children(launched.process.pid)
        try:
            await asyncio.wait_for(launched.exited(), _END_PATIENCE_S)
        except TimeoutError:
            raise TimeoutError(f"the processes of {self.instance} did not end within {_END_PATIENCE_S:g} s") from None

    def _remove(self) -> None:
        if self._cgroup is not None:
            self._cgroup.remove(_END_PATIENCE_S)
        remove_sandbox_directory(self._place.path)

    async def _describe_end(self) -> str:
        if self._launched is None:
            return "it was released"
        try:
            code = await asyncio.wait_for(self._launched.exited(), _EXIT_PATIENCE_S)
        except TimeoutError:
            return "the stream to it broke"
        if self._cgroup is not None and self._cgroup.oom_kills():
            return f"process 1 ended with exit code {code}, over the memory limit of {self.spec.memory_limit} bytes"
        return f"process 1 ended with exit code {code}"

    def _enroot_output(self) -> str:
        said = self._said.decode(errors="replace").strip()
        return f"enroot said: {said}" if said else "enroot said nothing."

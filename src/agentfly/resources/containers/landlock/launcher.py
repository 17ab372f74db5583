"""LandlockLauncher: starts sandboxes that are confined by Landlock, where no namespaces can be made."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from agentfly.errors import PrerequisiteError
from agentfly.resources.cgroups import CgroupHome
from agentfly.resources.containers.bubblewrap import layout
from agentfly.resources.containers.bubblewrap.capabilities import Tier
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace
from agentfly.resources.containers.bubblewrap.program import Program
from agentfly.resources.containers.bubblewrap.scratch import ATTENDANT, EXCHANGE
from agentfly.resources.containers.bubblewrap.seccomp import filter_program
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.landlock.capabilities import LandlockCapabilities
from agentfly.resources.containers.landlock.confine import landlock_version
from agentfly.resources.containers.landlock.processes import ProcessTree
from agentfly.resources.containers.spec import INSIDE, ContainerSpec

_PRIVATE = ("workdir", "home", "tmp")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_OF_ETC = ("passwd", "group", "nsswitch.conf", "hosts")


class LandlockLauncher(Launcher):
    """Starts sandboxes by `confine`. They see the host's files at their places, and write in directories of theirs."""

    def __init__(self, home: CgroupHome | None) -> None:
        """Start the launching thread and try a sandbox.

        Raises:
            PrerequisiteError: the kernel has no Landlock, or something else is missing.
        """
        version = landlock_version()
        if version == 0:
            raise PrerequisiteError(
                "There is no Landlock: it needs Linux 5.13 or newer, built with it and with 'landlock' in lsm=…"
            )
        self._version = version
        super().__init__(Tier.CONFINED, Program(Path(sys.executable)), home)

    def _found(self) -> Capabilities:
        return LandlockCapabilities.found(self._version, self.cgroups, own_user=self.uid is not None)

    def _try(self) -> None:
        if self._filter(ContainerSpec()) is None:
            raise PrerequisiteError(
                "There is no filter of system calls for this machine, and Landlock without one is no sandbox."
            )
        if self._out_of_reach:  # Python itself, which is more than the one file
            system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
            if system is None:
                raise PrerequisiteError(
                    f"An ordinary user must be able to run a Python, and cannot reach {sys.executable}. Install "
                    "AgentFly in a virtual environment outside of root's home directory, or the system's python3."
                )
            self._program, self._out_of_reach = Program(Path(system)), False
        super()._try()

    def _cure(self, complaint: str) -> str:
        return f"A program could not be confined by Landlock: {complaint.strip() or 'it gave no reason'}."

    def inside(self, exchange: Path) -> str:
        """See `Launcher.inside`."""
        return str(exchange)

    def workdir(self, spec: ContainerSpec, scratch: Path) -> str:
        """See `Launcher.workdir`."""
        return str(scratch / "workdir")

    def processes(self, first: int) -> ProcessNamespace:
        """See `Launcher.processes`."""
        return ProcessTree.of(first)

    def file_systems(self, spec: ContainerSpec) -> list[str]:
        """See `Launcher.file_systems`."""
        return []

    def _own_pids(self, spec: ContainerSpec) -> int:
        return 0  # its limit counts all processes of the user, so `confine` sets it, who can count them

    def _session_script(self, scratch: Path) -> str:
        private = self._session.replace("/tmp/", f"{scratch}/tmp/")
        return private.replace(str(INSIDE), self.inside(scratch / EXCHANGE))

    def _filter(self, spec: ContainerSpec) -> bytes | None:
        if not self._filters:
            return None
        accounted = self.cgroups is not None
        return filter_program(platform.machine(), namespaces=False, network=spec.network, accounted=accounted)

    def _compose(self, spec: ContainerSpec, image: Path | None, scratch: Path) -> tuple[list[str], dict[str, str]]:
        for name in _PRIVATE:
            (scratch / name).mkdir(mode=0o700)
        shutil.copyfile(Path(__file__).with_name(ATTENDANT), scratch / ATTENDANT)
        read = [f"/{name}" for name in (*layout.SYSTEM, "proc")]
        read += [f"/etc/{name}" for name in (*layout.etc_entries(), *_OF_ETC)]
        read += [os.path.realpath("/etc/resolv.conf")] * spec.network
        write = [f"/dev/{name}" for name in _DEVICES] + [str(scratch / name) for name in _PRIVATE]
        words = [str(self._program.path), "-I", "-S", str(scratch / ATTENDANT)]
        words += [word for path in read for word in ("--read", path)]
        words += [word for path in write for word in ("--write", path)]
        # what is in there the host opens too, so nothing in it may become a link to something else
        words += ["--write-to", str(scratch / EXCHANGE)]
        words += ["--chdir", self.workdir(spec, scratch), "--file-size", str(spec.disk_limit)]
        words += ["--pids", str(0 if self.cgroups else spec.pids)]
        own = {"HOME": str(scratch / "home"), "TMPDIR": str(scratch / "tmp")}
        return words, layout.environment(spec) | own | dict(spec.env)

"""Enroot: containers of the program that clusters have for unprivileged ones."""

from __future__ import annotations

import platform
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

from agentfly.errors import PrerequisiteError, ResourceStartError
from agentfly.resources.cgroups import CgroupHome, cgroup_home
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.bubblewrap.capabilities import FILTER_MISSING
from agentfly.resources.containers.bubblewrap.seccomp import filter_program
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.enroot import image as images
from agentfly.resources.containers.enroot.place import place_of
from agentfly.resources.containers.enroot.program import find
from agentfly.resources.containers.enroot.reaping import reap
from agentfly.resources.containers.enroot.sandbox import EnrootSandbox
from agentfly.resources.containers.enroot.trial import try_out
from agentfly.resources.containers.spec import ContainerSpec

_PROGRAM_MISSING = (
    "enroot is not on the PATH. It is a program of NVIDIA for Linux: install a package of its releases "
    "(https://github.com/NVIDIA/enroot/releases) and squashfs-tools, or ask your cluster for it ('module load enroot')."
)
_CGROUPS_MISSING = (
    "No control groups: this process may not make any, so the memory of a container as a whole and processor time are "
    "not limited. Start under 'systemd-run --user --scope -p Delegate=yes …', or as root; in a container, mount "
    "/sys/fs/cgroup writable."
)
_MEMORY_NOT_HELD = "the memory of its processes together has no limit, though that of each has"


class Enroot(Backend):
    """Containers of enroot.

    Args:
        program: its path; by default what is on the PATH.
        cgroups: whether control groups may be used, where there are any.
        store: where images are kept; by default in the cache directory.
    """

    name: ClassVar[str] = "enroot"

    def __init__(self, program: str | None = None, *, cgroups: bool = True, store: Path | None = None) -> None:
        self._chosen = program
        self._cgroups = cgroups
        self._chosen_store = store
        self._found: Capabilities | None = None
        self._probing = threading.Lock()

    def probe(self) -> Capabilities:
        """See `Backend.probe`. A failure is tried anew."""
        with self._probing:
            if self._found is None or not self._found.works:
                self._found = self._probe()
            return self._found

    @property
    def _store(self) -> Path:
        return self._chosen_store or images.store_directory()

    async def prepare(self, spec: ContainerSpec) -> None:
        """See `Backend.prepare`."""
        await images.prepare(self._program(), self._store, spec)

    def sandbox(self, spec: ContainerSpec, instance: str) -> EnrootSandbox:
        """See `Backend.sandbox`."""
        image = images.known(self._store, spec)
        if image is None:
            raise ResourceStartError(
                f"ContainerSpec(image={spec.image!r}) was changed or removed meanwhile. Try again."
            )
        return EnrootSandbox(spec, instance, program=self._program(), image=image, cgroups=self._home())

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """The directory on the host. It names the control groups, and the processes name it."""
        return {"place": str(place_of(instance))}

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap(traces)

    def _program(self) -> str:
        program = self._chosen or find()
        if program is None:
            raise ResourceStartError(_PROGRAM_MISSING)
        return program

    def _home(self) -> CgroupHome | None:
        return cgroup_home() if self._cgroups else None

    def _probe(self) -> Capabilities:
        program = self._chosen or find()
        if program is None:
            return self._absent(_PROGRAM_MISSING)
        try:
            return self._able(program, try_out(program))
        except PrerequisiteError as error:
            return self._absent(str(error))
        except (OSError, subprocess.SubprocessError) as error:
            return self._absent(f"What containers of enroot need could not be tried here: {error}")

    def _able(self, program: str, version: str) -> Capabilities:
        home = self._home()
        filtered = filter_program(platform.machine()) is not None
        return Capabilities(
            backend=self.name,
            works=True,
            how=f"{version} at {program}, a private layer in memory over each image",
            images=("path", "name"),
            memory="cgroup" if home else "none",
            pids="cgroup" if home else "rlimit",
            cpus=home is not None and "cpu" in home.parents,
            disk=True,
            network_off=True,
            filtered=filtered,
            writable_system=True,
            users=False,
            ports=True,
            freezes="cgroup" if home and "freezer" in home.cgroup("", cpus=0).directories else "none",
            not_isolated=() if home else (_MEMORY_NOT_HELD,),
            missing=(*(() if home else (_CGROUPS_MISSING,)), *(() if filtered else (FILTER_MISSING,))),
        )

    def _absent(self, why: str) -> Capabilities:
        return Capabilities(backend=self.name, works=False, missing=(why,))

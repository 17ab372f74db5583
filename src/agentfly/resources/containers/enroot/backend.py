"""Enroot: containers of the program that clusters offer to unprivileged users, and the trial that probes it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from agentfly.core.errors import PrerequisiteError, ResourceStartError
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.capabilities import (
    FILTER_MISSING,
    Capabilities,
    cgroups_missing,
    user_namespace_hint,
)
from agentfly.resources.containers.enroot import images
from agentfly.resources.containers.enroot.plan import PROGRAM, enroot_directory
from agentfly.resources.containers.enroot.program import enroot_environment, find_enroot
from agentfly.resources.containers.enroot.reaping import reap_enroot
from agentfly.resources.containers.enroot.sandbox import EnrootSandbox
from agentfly.resources.containers.runtime_directory import runtime_directory, sandbox_uid
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.cgroups import CgroupParent, writable_cgroup_parent
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord

_PATIENCE_S = 30.0
_LAYER = 2**20


def probe_enroot(program: str) -> str:
    """Try an enroot; its version.

    Raises:
        PrerequisiteError: something does not work. The message says what, and what to do.
    """
    if shutil.which("unsquashfs") is None:
        raise PrerequisiteError("unsquashfs, with which enroot unpacks images, is missing: install squashfs-tools.")
    place = runtime_directory() / f".enroot-trial-{uuid.uuid4().hex[:12]}"
    with CleanupRecord("sandbox-trial", REMOVE_DIRECTORY, {"directory": str(place)}), _removed(place):
        place.mkdir(mode=0o700)
        for name in ("run", "data/box", "layer", "image"):
            (place / name).mkdir(parents=True)
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, sandbox_uid(), sandbox_uid())
        given = enroot_environment(place, place / "data")
        try:
            asked = subprocess.run(
                [program, "version"], env=given, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PrerequisiteError(f"'{program} version' does not work: {error}. Install enroot anew.") from error
        if asked.returncode:
            raise PrerequisiteError(f"'{program} version' failed: {asked.stderr.strip()}. Install enroot anew.")
        _make_namespaces(place)
        return asked.stdout.strip()


@contextmanager
def _removed(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        remove_tree(place)


def _make_namespaces(place: Path) -> None:
    plan = {
        "place": str(place),
        "image": str(place / "image"),
        "uid": sandbox_uid(),
        "inside": 1000,
        "disk": _LAYER,
        "network": False,
        "groups": [],
        "limits": {},
        "mounts": [],
        "directories": [],
        "files": {},
        "first_lines": {},
    }
    with tempfile.TemporaryFile("w+") as file:
        json.dump(plan, file)
        file.seek(0)
        words = ["try", str(place), str(file.fileno())]
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(PROGRAM), *words],
            capture_output=True, text=True, timeout=_PATIENCE_S, check=False, pass_fds=[file.fileno()],
        )  # fmt: skip
    said = tried.stderr.strip()
    if tried.returncode and "lay it over" in said:
        raise PrerequisiteError(
            f"A private layer cannot be laid over an image: {said}. An ordinary user may do that from Linux 5.11 on."
        )
    if tried.returncode:
        raise PrerequisiteError(user_namespace_hint(said).replace("bubblewrap", "The layer around enroot"))


_PROGRAM_MISSING = (
    "enroot is not on the PATH. It is a program of NVIDIA for Linux: install a package of its releases "
    "(https://github.com/NVIDIA/enroot/releases) and squashfs-tools, or ask your cluster for it ('module load enroot')."
)
_CGROUPS_MISSING = cgroups_missing("the memory of a container as a whole and processor time are not limited")
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
        """See `Backend.probe`. After a failure the next call tries again."""
        with self._probing:
            if self._found is None or not self._found.available:
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
        image = images.prepared_image(self._store, spec)
        if image is None:
            raise ResourceStartError(
                f"ContainerSpec(image={spec.image!r}) was changed or removed meanwhile. Try again."
            )
        return EnrootSandbox(spec, instance, program=self._program(), image=image, cgroups=self._home())

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """The directory on the host. It names the control groups, and the processes name it."""
        return {"place": str(enroot_directory(instance))}

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap_enroot(traces)

    def _program(self) -> str:
        program = self._chosen or find_enroot()
        if program is None:
            raise ResourceStartError(_PROGRAM_MISSING)
        return program

    def _home(self) -> CgroupParent | None:
        return writable_cgroup_parent() if self._cgroups else None

    def _probe(self) -> Capabilities:
        program = self._chosen or find_enroot()
        if program is None:
            return self._absent(_PROGRAM_MISSING)
        try:
            return self._able(program, probe_enroot(program))
        except PrerequisiteError as error:
            return self._absent(str(error))
        except (OSError, subprocess.SubprocessError) as error:
            return self._absent(f"What containers of enroot need could not be tried here: {error}")

    def _able(self, program: str, version: str) -> Capabilities:
        home = self._home()
        filtered = filter_program(platform.machine()) is not None
        return Capabilities(
            backend=self.name,
            available=True,
            description=f"{version} at {program}, a private layer in memory over each image",
            images=("path", "name"),
            memory="cgroup" if home else "none",
            pids="cgroup" if home else "rlimit",
            cpus=home is not None and "cpu" in home.parents,
            disk=True,
            network_off=True,
            seccomp_filter=filtered,
            writable_system=True,
            multiple_users=False,
            ports=True,
            freeze="cgroup" if home and "freezer" in home.cgroup("", cpus=0).directories else "none",
            isolation_gaps=() if home else (_MEMORY_NOT_HELD,),
            missing=(*(() if home else (_CGROUPS_MISSING,)), *(() if filtered else (FILTER_MISSING,))),
        )

    def _absent(self, why: str) -> Capabilities:
        return Capabilities(backend=self.name, available=False, missing=(why,))

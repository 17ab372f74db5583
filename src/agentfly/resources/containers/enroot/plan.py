"""EnrootDirectory: the directory on the host that belongs to one enroot sandbox, and the plans of its programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.resources.containers.enroot.images import EnrootImage
from agentfly.resources.containers.enroot.namespaces import DEVICES
from agentfly.resources.containers.enroot.program import enroot_environment
from agentfly.resources.containers.runtime_directory import runtime_directory, sandbox_uid
from agentfly.resources.containers.seccomp import filter_program
from agentfly.resources.containers.spec import SHELL_MOUNT, ContainerSpec
from agentfly.resources.process.cgroups import Cgroup

PROGRAM = Path(__file__).with_name("namespaces.py")
"""The program that carries out the plans."""
GROUPS = "groups"
CONTAINER_NAME = "box"  # what enroot calls the container
_DIRECTORIES = ("run", "config", "system/mounts.d", "system/hooks.d", "system/environ.d", "cache", "data/box", "layer")
_EXCHANGE_SIZE = 160 * 2**20
_FILES = 4096
_SERVER_PROCESSES = 4  # processes of ours in a sandbox
_SERVER_PROCESS_RESERVE = 16  # for these to start others when what runs inside has taken all that it may
_UID = 1000
# What enroot starts does nothing until its input ends.
_RC = "echo ready; exec /bin/bash -c 'read -r'\n"


class EnrootDirectory:
    """The directory of a sandbox, and the plans for what is started there."""

    def __init__(self, spec: ContainerSpec, instance: str) -> None:
        """Name it; nothing is made yet."""
        self.spec = spec
        self.path = enroot_directory(instance)

    def create(self, cgroup: Cgroup | None) -> None:
        """Make it, with what enroot is to find there.

        Raises:
            PrerequisiteError: what is mounted cannot be written in the way that enroot reads it.
        """
        mounts = self._mounts()
        self.path.mkdir(mode=0o711)
        for name in (*_DIRECTORIES, "mounts"):
            (self.path / name).mkdir(parents=True)
        if cgroup is not None:
            (self.path / GROUPS).write_text("\n".join(map(str, cgroup.paths)))
        (self.path / "system/mounts.d/10-sandbox.fstab").write_text(mounts)
        (self.path / "rc").write_text(_RC)
        if os.geteuid() == 0:
            for directory in (self.path, *(entry for entry in self.path.rglob("*") if entry.is_dir())):
                os.chown(directory, sandbox_uid(), sandbox_uid())

    def make_plan(
        self, program: str, words: Sequence[str], image: EnrootImage, cgroup: Cgroup | None
    ) -> dict[str, Any]:
        """The plan for ``namespaces.py make``.

        Args:
            program: the path of enroot.
            words: the program that process 1 is to become.
            image: the sandbox's image.
            cgroup: its control group.
        """
        spec = self.spec
        return {
            **self._common([*words, str(self.path)], image, cgroup, self.pids),  # known by its words, as its parent is
            "place": str(self.path),
            "inside": self._uid,
            "network": spec.network,
            "image": str(image.root),
            "disk": spec.disk_limit,
            "mounts": [source for source, _ in spec.mounts],
            "directories": [spec.home, spec.workdir],
            "files": self._files(),
            "first_lines": {
                "/etc/passwd": f"{spec.user}:x:{self._uid}:{self._uid}:{spec.user}:{spec.home}:/bin/bash",
                "/etc/group": f"{spec.user}:x:{self._uid}:",
            },
            "enroot": [program, "start", "--rw", "--rc", str(self.path / "rc"), CONTAINER_NAME],
            "enroot_environment": enroot_environment(self.path, self.path / "data"),
        }

    def join_plan(
        self, parent: int, first: int, words: Sequence[str], image: EnrootImage, cgroup: Cgroup | None
    ) -> dict[str, Any]:
        """The plan for ``namespaces.py join``.

        Args:
            parent: the host's id of the parent of process 1.
            first: the host's id of process 1.
            words: the program that is to run inside.
            image: the sandbox's image.
            cgroup: its control group.
        """
        return {**self._common(words, image, cgroup, self._agents), "parent": parent, "first": first}

    def _common(
        self, words: Sequence[str], image: EnrootImage, cgroup: Cgroup | None, processes: int
    ) -> dict[str, Any]:
        limits = {"RLIMIT_NOFILE": _FILES, "RLIMIT_CORE": 0, "RLIMIT_NPROC": processes}
        if cgroup is None:
            limits["RLIMIT_AS"] = self.spec.memory_limit
        return {
            "uid": sandbox_uid(),
            "groups": [] if cgroup is None else [str(path) for path in cgroup.paths],
            "limits": limits,
            "workdir": self.spec.workdir,
            "filter": (filter_program(platform.machine(), accounted=cgroup is not None) or b"").hex(),
            "program": list(words),
            "program_environment": self._environment(image),
        }

    @property
    def _uid(self) -> int:
        return 0 if self.spec.user == "root" else _UID

    @property
    def pids(self) -> int:
        """Maximum number of processes, including ours. The agent's processes may take fewer."""
        return self._agents + _SERVER_PROCESS_RESERVE

    @property
    def limit_command(self) -> list[str]:
        """Command prefix for a program of the agent that leaves some processes of the limit to the server."""
        return ["/bin/bash", "-c", f'ulimit -u {self._agents} && exec "$@"', "bash"]

    @property
    def _agents(self) -> int:
        return self.spec.pids + _SERVER_PROCESSES

    def _environment(self, image: EnrootImage) -> dict[str, str]:
        spec = self.spec
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **dict(image.variables),
            "HOME": spec.home,
            "USER": spec.user,
            "LOGNAME": spec.user,
            **dict(spec.env),
        }

    def _files(self) -> dict[str, str]:
        """Files of every sandbox. The image's own fstab could have enroot mount what it likes of the host."""
        files = {"/etc/fstab": "", "/etc/environment": ""}
        if self.spec.network:
            names = Path("/etc/resolv.conf")
            files["/etc/resolv.conf"] = names.read_text() if names.is_file() else ""
        else:
            files["/etc/hosts"] = "127.0.0.1 localhost sandbox\n::1 localhost\n"
        return files

    def _mounts(self) -> str:
        """Return enroot's mounts, in the format of ``mounts.d``."""
        lines = ["/proc /proc none x-create=dir,rbind,nosuid,nodev,noexec 0 -1"]
        lines += [f"/dev/{name} /dev/{name} none x-create=file,bind,nosuid,noexec 0 -1" for name in DEVICES]
        lines.append("devpts /dev/pts devpts x-create=dir,nosuid,noexec,newinstance,ptmxmode=0666,mode=620 0 -1")
        size = f"size={_EXCHANGE_SIZE},mode=1777"
        lines.append(f"tmpfs {SHELL_MOUNT} tmpfs x-create=dir,nosuid,nodev,noexec,{size} 0 -1")
        for number, (_, target) in enumerate(self.spec.mounts):
            if any(character in target for character in "$#\\\n\t"):
                raise PrerequisiteError(
                    f"ContainerSpec(mounts=…): enroot cannot mount at {target!r}. Leave out '$', '#', backslashes, "
                    "tabs and line ends."
                )
            where = target.replace(" ", "\\040")
            lines.append(f"{self.path / 'mounts' / str(number)} {where} none x-create=auto,rbind 0 -1")
        return "".join(f"{line}\n" for line in lines)


def enroot_directory(instance: str) -> Path:
    """The directory of an instance."""
    return runtime_directory() / f"{instance}.enroot"

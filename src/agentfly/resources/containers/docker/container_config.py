"""ContainerConfig: a container's configuration for a spec, as the engine's API expects it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfly.resources.containers.docker.images import ImageInspection
from agentfly.resources.containers.spec import SHELL_MOUNT, ContainerSpec
from agentfly.resources.containers.stream_shell.protocol import SERVER_COMMAND, ShellScripts

AGENT = "1000:1000"
ROOT = "0:0"
# The server needs these to kill the agent's processes, to start them without rights, and to empty its directories.
_SERVER_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how such a file writes blanks
_FILES = 4096
_PROCESSES = 16384  # of a user of the host, in all its containers together; each has its own limit beside it
_MIN_SIZE = 2**20
_EXCHANGE_SIZE = 160 * 2**20


class ContainerConfig:
    """The engine's configuration for the containers of a spec.

    For an ordinary user, the image is mounted read-only, and writable directories are in memory, within its limits. If
    the image has the necessary programs, the server in the container is then *privileged*: it runs as another user that
    nothing inside can reach. It resets the sandbox by killing all processes and emptying these directories. Root may
    write everywhere, in the container's own layer, so only a new container is clean.

    Attributes:
        inspection: the facts about its image.
        privileged_server: whether the server is privileged.
    """

    def __init__(self, spec: ContainerSpec, facts: ImageInspection) -> None:
        """Plan for a spec.

        Args:
            spec: what is asked.
            facts: what its image has.
        """
        self.spec = spec
        self.inspection = facts
        self.privileged_server = spec.user == "agent" and facts.supports_privileged_server

    @property
    def image(self) -> str:
        """The engine's name of the image."""
        return self.inspection.base_image

    @property
    def user(self) -> str:
        """The user of the session and of programs run beside it."""
        return ROOT if self.spec.user == "root" else AGENT

    @property
    def server_user(self) -> str:
        """The user of the server in the container."""
        return ROOT if self.privileged_server else self.user

    @property
    def tmpfs_sizes(self) -> dict[str, int]:
        """The directories that the agent may write to, each with its size in bytes, if they are in memory."""
        if self.spec.user == "root":
            return {}
        share = max(_MIN_SIZE, self.spec.disk_limit // 8)
        others = dict.fromkeys((self.spec.home, "/tmp", "/var/tmp", "/dev/shm"), share)
        return {**others, self.spec.workdir: 4 * share}

    @property
    def reset_directories(self) -> list[str]:
        """The directories that a reset in place empties."""
        return [*self.tmpfs_sizes, "/dev/mqueue"]

    @property
    def drop_privileges(self) -> list[str]:
        """Command prefix that drops the rights that the server has and the agent must not have."""
        return drop_privileges_command(self.user) if self.privileged_server else []

    def server_source(self, scripts: ShellScripts) -> bytes:
        """Source code of the server in the container."""
        owned = [self.spec.workdir, self.spec.home] if self.privileged_server else []
        return scripts.server(self.drop_privileges, AGENT, owned)

    def request_body(self, labels: dict[str, str]) -> dict[str, Any]:
        """Return the body of the request that creates a container.

        Args:
            labels: the container's labels.
        """
        spec = self.spec
        environment = {"HOME": spec.home, "USER": spec.user, "LOGNAME": spec.user, **dict(spec.env)}
        return {
            "Image": self.image,
            "Entrypoint": [],
            "Cmd": SERVER_COMMAND,
            "User": self.server_user,
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "WorkingDir": spec.workdir,
            "Labels": labels,
            "Healthcheck": {"Test": ["NONE"]},
            "OpenStdin": True,
            "StdinOnce": True,  # so that it ends with whoever started it
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "NetworkDisabled": not spec.network,
            "HostConfig": self._host_config(),
        }

    def _host_config(self) -> dict[str, Any]:
        spec = self.spec
        config: dict[str, Any] = {
            "NetworkMode": "default" if spec.network else "none",
            "Memory": spec.memory_limit,
            "MemorySwap": spec.memory_limit,
            "PidsLimit": spec.pids + (4 if self.privileged_server else 0),
            "NanoCpus": round(spec.cpus * 1e9),
            "ReadonlyRootfs": spec.user != "root",
            "CapDrop": ["ALL"],
            "CapAdd": list(_SERVER_CAPABILITIES) if self.privileged_server else [],
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
            "ShmSize": self.tmpfs_sizes.get("/dev/shm", 64 * 2**20),
            "Tmpfs": self._in_memory(),
            "Mounts": [view for source, target in spec.mounts for view in _views(source, target)],
            "Ulimits": [
                {"Name": "nofile", "Soft": _FILES, "Hard": _FILES},
                {"Name": "nproc", "Soft": _PROCESSES, "Hard": _PROCESSES},
            ],
        }
        if spec.runtime:
            config["Runtime"] = spec.runtime
        return config

    def _in_memory(self) -> dict[str, str]:
        mode = "755" if self.privileged_server else "1777"
        exchange = {str(SHELL_MOUNT): f"rw,noexec,nosuid,nodev,size={_EXCHANGE_SIZE},mode={mode}"}
        sizes = {path: size for path, size in self.tmpfs_sizes.items() if path != "/dev/shm"}
        return {**{path: f"rw,exec,nosuid,nodev,size={size},mode=1777" for path, size in sizes.items()}, **exchange}


def _views(source: str, target: str) -> Iterator[dict[str, Any]]:
    """Return the mounts that show a host path read-only, with everything that is mounted below it.

    An engine makes a mount read-only, but not the mounts below it, which would stay writable. So those are not
    included, and each known mount below the path gets a read-only mount of its own.
    """
    for below in ["", *mounted_below(source)]:
        yield {
            "Type": "bind",
            "Source": source.rstrip("/") + below or "/",
            "Target": target.rstrip("/") + below,
            "ReadOnly": True,
            "BindOptions": {"NonRecursive": True},
        }


def mounted_below(path: str, mounts: str = "/proc/self/mountinfo") -> list[str]:
    """Return the mount points below a host path: the rest of each path, beginning with a slash.

    Args:
        path: an absolute path.
        mounts: a file that lists mounts in the format of proc_pid_mountinfo(5).
    """
    real = os.path.realpath(path).rstrip("/")
    found: list[str] = []
    for line in Path(mounts).read_text(errors="surrogateescape").rstrip("\n").split("\n"):
        place = _OCTAL.sub(lambda code: chr(int(code[1], 8)), line.split(" ")[4]).rstrip("/")
        found = [below for below in found if not f"{real}{below}".startswith(f"{place}/")]  # which this one hides
        if place.startswith(f"{real}/") and place[len(real) :] not in found:
            found.append(place[len(real) :])
    return sorted(found)


def drop_privileges_command(user: str) -> list[str]:
    """Words before a program that make it one of a user (``UID:GID``) without any capability."""
    uid, _, gid = user.partition(":")
    ids = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    return ["setpriv", *ids, "--inh-caps=-all", "--bounding-set=-all", "--"]

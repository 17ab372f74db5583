"""ContainerSpec: what a container is made of and what it may use; SnapshotImage: a container's files as an image."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from agentfly.core.errors import ConfigError
from agentfly.core.numbers import parse_byte_size
from agentfly.resources.kind import ResourceKind
from agentfly.resources.spec import EnvironmentVariables, ResourceSpec, normalize_env

if TYPE_CHECKING:
    from agentfly.resources.containers.container import Container  # noqa: F401  (named in the base class)


PREFIX = "snapshot:"


class SnapshotImage(str):
    """The name of a snapshot, for a spec's ``image``. The snapshot lives as long as this object.

    Specs, sandboxes and pools with this image keep it alive. A copy of its text, as in a pickle, does not.
    """

    def __new__(cls, backend: str, name: str, drop: Callable[[], object]) -> SnapshotImage:
        """Name a snapshot.

        Args:
            backend: the backend that made it. No other backend can use it.
            name: the backend's name for it.
            drop: called once when nothing refers to the snapshot any more, or at the exit of the process. It may run on
                any thread at any moment, so it may only record what to remove.
        """
        image = super().__new__(cls, f"{PREFIX}{backend}:{name}")
        weakref.finalize(image, drop)
        return image

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def snapshot_name(image: str, backend: str) -> str | None:
    """The backend's name of a snapshot image; None if the image is not a snapshot of this backend."""
    prefix = f"{PREFIX}{backend}:"
    return image.removeprefix(prefix) if image.startswith(prefix) else None


DEFAULT_MEMORY = 2**30
HOST_IMAGE = "host"
_IMAGE_NAME = re.compile(r"[a-zA-Z0-9][\w.:/@+-]*")
_ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".sqsh")
ImageKind = Literal["host", "path", "name", "snapshot"]


@dataclass(frozen=True)
class BackendEntry:
    """Static facts about a backend, available without importing it.

    Args:
        address: import address of its class.
        image_kinds: the kinds of image that it supports. The machine may allow fewer.
    """

    address: str
    image_kinds: tuple[ImageKind, ...]


_HERE = "agentfly.resources.containers"
BACKENDS = {
    "bubblewrap": BackendEntry(f"{_HERE}.bubblewrap.backend:Bubblewrap", ("host", "path", "snapshot")),
    "docker": BackendEntry(f"{_HERE}.docker.backend:Docker", ("name", "snapshot")),
    "podman": BackendEntry(f"{_HERE}.docker.backend:Podman", ("name", "snapshot")),
    "enroot": BackendEntry(f"{_HERE}.enroot.backend:Enroot", ("path", "name")),
    "landlock": BackendEntry(f"{_HERE}.landlock.backend:Landlock", ("host",)),
}
"""The backends by name, best first."""
SHELL_MOUNT = PurePosixPath("/run/agentfly")  # where a sandbox sees its shell's directory on the host
# A mount at or below one of these would hide files that the shell and its programs need.
_PROGRAMS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_RESERVED_TREES = ("/dev", "/proc", "/sys", str(SHELL_MOUNT), *_PROGRAMS, *(f"/usr{path}" for path in _PROGRAMS))
_RESERVED_PATHS = ("/", "/etc", "/run", "/usr")


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(ResourceSpec["Container"]):
    """A sandbox with its own file system, processes and limits, and a shell that lasts.

    A limit that this machine cannot enforce is an error before the start. The error says how to fix it.

    Args:
        image: ``"host"`` for the host's system directories (and nothing else of the host); the absolute path of a root
            file system that has ``/bin/bash``, as a directory or as an archive (a tar of it, what ``docker save``
            writes, or an OCI layout, compressed or not), which is unpacked once; or, where the backend has images by
            name, an image name. No image is ever changed: writes go to a private layer that ends with the sandbox.
        cpus: processor cores that the sandbox may use; 0 means no limit of its own.
        gpus: must be 0: no graphics processor is passed on to a container.
        memory: bytes, or a text such as ``"256MiB"``, for processes and private files together; 0 means 1 GiB.
        pids: the most processes and threads at once.
        disk: size of the private layer, which lives in memory; 0 means half of the memory limit. Where the tier is
            ``user``, half of it is for the workdir and an eighth for each other directory that can be written.
        network: whether the sandbox shares the host's network. Without it there is the loopback only.
        ports: TCP ports inside that the host can reach by ``await box.port(8000)``, even without network.
        mounts: read-only views of host paths, as pairs of the host's path and the path inside.
        env: environment variables, as a mapping or as pairs. The host's environment is not visible inside. Values may
            be secrets, so they are not in the spec's repr.
        workdir: the directory, writable, in which the shell starts.
        max_image_size: bytes, or a text such as ``"64GiB"``, that the files of an image in an archive may have.
        max_image_files: the most files, directories and links of such an image.
        user: the ordinary user ``"agent"``, or ``"root"`` for programs that insist on user id 0. Either is an
            ordinary user of the host, without any capability.
        setup: commands run in the shell after each start and each reset; one that fails fails the start.
        backend: the isolating program. ``"auto"`` selects the best one available.
        runtime: the runtime of docker or podman, by the name that the engine's configuration gives it, such as
            ``"runsc"`` for gVisor; empty for the engine's own.
        isolation: ``"weak"`` accepts a machine on which a container cannot be isolated fully, for code that means no
            harm; `agentfly doctor` names what does not hold there.
    """

    kind = ResourceKind(
        "container",
        "agentfly.resources.containers.container:Container",
        reap="agentfly.resources.containers.backend:reap",
    )

    image: str = HOST_IMAGE
    pids: int = 256
    disk: int | str = 0
    network: bool = False
    ports: tuple[int, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    env: EnvironmentVariables = ()
    workdir: str = "/workspace"
    max_image_size: int | str = "64GiB"
    max_image_files: int = 2_000_000
    user: Literal["agent", "root"] = "agent"
    setup: tuple[str, ...] = ()
    backend: Literal["auto", "bubblewrap", "docker", "podman", "enroot", "landlock"] = "auto"
    runtime: str = ""
    isolation: Literal["full", "weak"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_names()
        self._normalize_sequences()
        normalize_env(self)
        self._check_image()
        self._check_limits()
        self._check_paths()

    @property
    def start_weight(self) -> int:
        """Two for backends that start containers through a daemon or another program. Parallel starts do not speed
        those up.
        """
        return 2 if self.backend in ("docker", "podman", "enroot") else 1

    @property
    def memory_limit(self) -> int:
        """Bytes that processes and private files may take together."""
        return self.memory_bytes or DEFAULT_MEMORY

    @property
    def disk_limit(self) -> int:
        """Bytes that private files may take."""
        return parse_byte_size(self.disk) or self.memory_limit // 2

    @property
    def home(self) -> str:
        """The home directory of the sandbox's user."""
        return "/root" if self.user == "root" else f"/home/{self.user}"

    @property
    def image_kind(self) -> ImageKind:
        """The kind of image, which decides the backends that can use it."""
        if self.image == HOST_IMAGE:
            return "host"
        if self.image.startswith("/"):
            return "path"
        return "snapshot" if self.image.startswith(PREFIX) else "name"

    @property
    def preparation_key(self) -> Hashable | None:
        """The image, backend and limits that identify a prepared image. None if nothing is fetched or unpacked."""
        if self.image_kind not in ("path", "name"):
            return None
        return self.image, self.backend, parse_byte_size(self.max_image_size), self.max_image_files

    def _check_image(self) -> None:
        if self.image_kind == "name" and (self.image[:1] in (".", "~") or self.image.endswith(_ARCHIVE_SUFFIXES)):
            raise self._field_error(
                "image", "a path must be absolute, for instance str(Path(…).expanduser().absolute())"
            )
        path = self.image_kind == "path" and PurePosixPath(self.image).parts[1:] == ()
        name = self.image_kind == "name" and not _IMAGE_NAME.fullmatch(self.image)
        if path or name or "\0" in self.image:
            raise ConfigError(
                f"ContainerSpec(image={self.image!r}): an image is 'host', the absolute path of a root file system "
                "other than that of the host itself, or a name such as 'debian:12'."
            )

    def _check_limits(self) -> None:
        self._require_int("pids", least=8)  # the shell itself needs some
        self._require_int("max_image_files", least=1)
        if not self._require_size("max_image_size"):
            raise self._field_error("max_image_size", "write a size above 0")
        for name, least in (("memory", 16), ("disk", 1)):
            if 0 < (size := self._require_size(name)) < least * 2**20:
                bare = str(getattr(self, name)).strip().isdecimal()  # a number without a unit counts bytes
                meant = f"; write '{size}MiB' if you mean that" if bare and size >= least else ""
                raise self._field_error(name, f"that is {size} bytes, and a sandbox needs at least {least}MiB{meant}")
        if self.gpus:
            raise self._field_error(
                "gpus",
                "no graphics processor is passed on to a container; leave it out. Models run in a ModelServerSpec",
            )
        if self.disk_limit >= self.memory_limit:
            raise ConfigError(
                f"ContainerSpec(disk={self.disk!r}) is not below its memory of {self.memory_limit} bytes. Private "
                "files live in memory and count as such: ask for more memory or for less disk."
            )

    def _check_paths(self) -> None:
        for path in (self.workdir, *(target for _, target in self.mounts)):
            plain = PurePosixPath(path)
            own = path.startswith("/") and ".." not in plain.parts and str(plain) == path and "\0" not in path
            if not own or path in _RESERVED_PATHS or any(plain.is_relative_to(taken) for taken in _RESERVED_TREES):
                raise ConfigError(
                    f"ContainerSpec: {path!r} cannot be a directory inside. Give an absolute path without '..' or a "
                    f"slash at its end, such as /workspace or /mnt/data: none of {', '.join(_RESERVED_PATHS)}, and "
                    f"nothing at or below {', '.join(_RESERVED_TREES)}."
                )
        for source, _ in self.mounts:
            if not source.startswith("/") or "\0" in source:
                raise ConfigError(f"ContainerSpec(mounts=…): the host path {source!r} is not absolute.")

    def _check_names(self) -> None:
        self._require_one_of("isolation", "full", "weak")
        self._require_one_of("user", "agent", "root")
        self._require_one_of("backend", "auto", *BACKENDS)
        for name in ("image", "workdir", "runtime"):
            self._require_str(name)
        if not isinstance(self.network, bool):
            raise self._field_error("network", "write True or False, without quotes; without it there is no network")

    def _normalize_sequences(self) -> None:
        for name in ("setup", "mounts", "ports"):
            self._normalize_tuple(name)
        mounts = tuple(tuple(mount) if isinstance(mount, list) else mount for mount in self.mounts)
        object.__setattr__(self, "mounts", mounts)
        for command in self.setup:
            if not isinstance(command, str) or "\0" in command:
                raise ConfigError(f"ContainerSpec(setup=…): {command!r} is not a command; write text without NUL.")
        for mount in self.mounts:
            if not _is_pair(mount):
                raise ConfigError(
                    f"ContainerSpec(mounts=…): {mount!r} is not a pair of texts. Write (path on the host, path "
                    "inside); what is mounted is always read-only."
                )
        for port in self.ports:
            if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 2**16:
                raise ConfigError(f"ContainerSpec(ports=…): {port!r} is not a port; write whole numbers of 1 to 65535.")


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(word, str) for word in item)

"""ContainerSpec: what a sandbox is made of and what it may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from agentfly.errors import ConfigError
from agentfly.resources.byte_size import parse_bytes
from agentfly.resources.registry import register
from agentfly.resources.spec import ResourceSpec

if TYPE_CHECKING:
    from agentfly.resources.containers.container import Container  # noqa: F401  (named in the base class)

DEFAULT_MEMORY = 2**30
HOST_IMAGE = "host"
INSIDE = PurePosixPath("/run/agentfly")  # where the sandbox finds what belongs to the host's side of its shell
_TAKEN = ("/", "/dev", "/proc", "/sys", str(INSIDE))


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(ResourceSpec["Container"]):
    """A sandbox with its own file system, processes and limits, and a shell that lasts.

    What is asked here and cannot be enforced on the machine at hand fails before the start, with the cure.

    Args:
        image: ``"host"`` for the host's system directories (and nothing else of the host), or the absolute path of a
            directory with an unpacked root file system that has ``/bin/bash``. Neither is ever changed: writes go to
            a private layer that ends with the sandbox.
        cpus: processor cores that the sandbox may use; 0 means no limit of its own.
        memory: bytes, or a text such as ``"256MiB"``, for processes and private files together; 0 means 1 GiB.
        pids: the most processes and threads at once.
        disk: size of the private layer, which lives in memory; 0 means half of the memory limit.
        network: whether the sandbox shares the host's network. Without it there is the loopback only.
        mounts: read-only views of host paths, as pairs of the host's path and the path inside.
        env: environment variables, as pairs. Nothing of the host's environment is seen inside.
        workdir: the directory, writable, in which the shell starts.
        user: the ordinary user ``"agent"``, or ``"root"`` for programs that insist on user id 0. Either is an
            ordinary user of the host, without any capability.
        setup: commands run in the shell after each start and each reset; one that fails fails the start.
        backend: the program that isolates. ``"auto"`` takes the best one present.
    """

    image: str = HOST_IMAGE
    pids: int = 256
    disk: int | str = 0
    network: bool = False
    mounts: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/workspace"
    user: Literal["agent", "root"] = "agent"
    setup: tuple[str, ...] = ()
    backend: Literal["auto", "bubblewrap"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_words()
        self._check_image()
        self._check_limits()
        self._check_paths()

    @property
    def memory_limit(self) -> int:
        """Bytes that processes and private files may take together."""
        return self.memory_bytes or DEFAULT_MEMORY

    @property
    def disk_limit(self) -> int:
        """Bytes that private files may take."""
        return parse_bytes(self.disk) or self.memory_limit // 2

    @property
    def home(self) -> str:
        """The home directory of the sandbox's user."""
        return "/root" if self.user == "root" else f"/home/{self.user}"

    def _check_image(self) -> None:
        if self.image != HOST_IMAGE and (not self.image.startswith("/") or PurePosixPath(self.image).parts[1:] == ()):
            raise ConfigError(
                f"ContainerSpec(image={self.image!r}): an image is 'host' or the absolute path of a directory with an "
                "unpacked root file system, other than that of the host itself."
            )

    def _check_limits(self) -> None:
        if self.pids < 8:
            raise ConfigError(f"ContainerSpec(pids={self.pids}): the shell itself needs some; give it at least 8.")
        if self.memory_limit < 16 * 2**20:
            raise ConfigError(f"ContainerSpec(memory={self.memory!r}): a sandbox needs at least 16MiB.")
        if self.disk_limit >= self.memory_limit:
            raise ConfigError(
                f"ContainerSpec(disk={self.disk!r}) is not below its memory of {self.memory_limit} bytes. Private "
                "files live in memory and count as such: ask for more memory or for less disk."
            )

    def _check_paths(self) -> None:
        inside = [self.workdir, *(target for _, target in self.mounts)]
        for path in inside:
            plain = PurePosixPath(path)
            if not path.startswith("/") or ".." in plain.parts or str(plain) in _TAKEN or str(plain) != path:
                raise ConfigError(
                    f"ContainerSpec: {path!r} cannot be a directory inside. Give an absolute path without '..' or a "
                    f"slash at its end, and none of {', '.join(_TAKEN)}."
                )
        for source, _ in self.mounts:
            if not source.startswith("/"):
                raise ConfigError(f"ContainerSpec(mounts=…): the host path {source!r} is not absolute.")

    def _check_words(self) -> None:
        for name, words in (("setup", self.setup), ("mounts", self.mounts), ("env", self.env)):
            if not isinstance(words, tuple):
                raise ConfigError(
                    f"ContainerSpec({name}={words!r}): specs are hashable values, so write a tuple"
                    + (", for instance tuple({...}.items())." if name == "env" else ".")
                )
        for name, value in self.env:
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"ContainerSpec(env=…): {name!r} cannot be the name of an environment variable.")
        if self.user not in ("agent", "root"):
            raise ConfigError(f"ContainerSpec(user={self.user!r}): the user inside is 'agent' or 'root'.")
        if self.backend not in ("auto", "bubblewrap"):
            raise ConfigError(f"ContainerSpec(backend={self.backend!r}): there is 'auto' and 'bubblewrap'.")


register(
    ContainerSpec,
    "agentfly.resources.containers.container:Container",
    kind="container",
    reap="agentfly.resources.containers.reaping:reap",
)

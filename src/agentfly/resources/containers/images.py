"""Images: root file systems by their path on the host, as a directory or as an archive, which is unpacked once.

An archive may be a tar of the root file system, what ``docker save`` writes, or an OCI image layout as a tar or as a
directory; its layers may be compressed. What it unpacks to is kept in the cache directory, by the archive's content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from agentfly.errors import ResourceStartError
from agentfly.resources.containers.unpacking import Unpacker, open_archive

_MANIFEST, _INDEX = "manifest.json", "index.json"
_NESTED = 4  # an index may name an index
_BLOCK = 2**20


def root_directory(image: str) -> Path:
    """The directory with the root file system of an image, which has been prepared.

    Raises:
        ResourceStartError: there is none.
    """
    path = Path(image)
    if path.is_file() or _is_layout(path):
        path = _unpacked(path)
    if not (path / "bin" / "bash").exists() and not (path / "usr" / "bin" / "bash").exists():
        raise ResourceStartError(
            f"ContainerSpec(image={image!r}): no directory with an unpacked root file system that has /bin/bash is "
            "there on this host, nor an archive of one."
        )
    return path.resolve()


def prepare(image: str) -> None:
    """Unpack an image, if it is an archive that has not been unpacked. Another process that is at it is waited for.

    Raises:
        ResourceStartError: it is no archive of a root file system, or there is no room for it.
    """
    path = Path(image)
    if not path.is_file() and not _is_layout(path):
        return
    try:
        if _unpacked(path).is_dir():
            return
        with _alone(store() / f"{_mark(path)}.lock"):
            if not _unpacked(path).is_dir():
                _unpack(path)
    except (OSError, EOFError, tarfile.TarError, ValueError, LookupError) as error:
        raise ResourceStartError(
            f"ContainerSpec(image={image!r}) could not be unpacked into {store()}: {error or type(error).__name__}. "
            "Give a tar of a root file system, what 'docker save' writes, or an OCI layout. For another place, set "
            "AGENTFLY_CACHE_DIR."
        ) from error


def store() -> Path:
    """Where unpacked images are kept. Those of root are where the ordinary users that its sandboxes are can go."""
    chosen = os.environ.get("AGENTFLY_CACHE_DIR")
    if chosen:
        return Path(chosen) / "images"
    if os.geteuid() == 0:
        return Path("/var/cache/agentfly/images")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfly" / "images"


def _mark(path: Path) -> str:
    """A name for an archive as it is now, by what changes whenever its content does."""
    about = path.stat()
    known = (str(path.resolve()), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _unpacked(path: Path) -> Path:
    """Where an archive has been unpacked: a link of its mark leads there, once it is whole."""
    return store() / _mark(path)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unpack(path: Path) -> None:
    place, mark = store(), _mark(path)
    content = place / f"sha256-{_digest(path)}"
    with _alone(Path(f"{content}.lock")):  # another archive of the same content
        if not content.is_dir():
            draft = place / f".{content.name}"
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed at it
            try:
                draft.mkdir(mode=0o755)
                unpacker = Unpacker(draft)
                with _opened(path) as archive:
                    for layer in archive.layers():
                        with open_archive(layer, "r|*") as members:
                            unpacker.add(members, layer=archive.layered)
                unpacker.finish()
                draft.rename(content)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    link = place / f".{mark}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(content.name)
    link.rename(place / mark)


def _digest(path: Path) -> str:
    """The digest of an archive's content; of a layout's, that of its index, which names all else by digest."""
    digest = hashlib.sha256()
    with (path / _INDEX if path.is_dir() else path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _is_layout(path: Path) -> bool:
    return (path / _INDEX).is_file() and (path / "oci-layout").is_file()


class _Archive(ABC):
    """An image, wherever it is: its layers, lowest first."""

    layered: ClassVar[bool]

    @abstractmethod
    def layers(self) -> Iterator[IO[bytes]]:
        """The layers, each to be read before the next."""


class _Layered(_Archive):
    """An image whose files say of which of them its layers are."""

    layered = True

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """A file of the image."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    def read(self, name: str) -> bytes:
        """A small file of the image."""
        with self.open(name) as file:
            return file.read(_BLOCK * 16)

    def layers(self) -> Iterator[IO[bytes]]:
        """See `_Archive.layers`."""
        for name in self._names():
            with self.open(name) as layer:
                yield layer

    def _names(self) -> list[str]:
        if self.has(_MANIFEST):
            images = json.loads(self.read(_MANIFEST))
            if len(images) != 1:
                raise ValueError(f"it holds {len(images)} images; save one alone")
            return [str(name) for name in images[0]["Layers"]]
        found = json.loads(self.read(_INDEX))
        for _ in range(_NESTED):
            if "layers" in found:
                return [_blob(layer) for layer in found["layers"]]
            found = json.loads(self.read(_blob(_chosen(found["manifests"]))))
        raise ValueError("its index names no image")


class _Layout(_Layered):
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        return (self._path / name).open("rb")

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()


class _Saved(_Layered):
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._members = {member.name.removeprefix("./"): member for member in archive}

    def open(self, name: str) -> IO[bytes]:
        member = self._members[name]
        if member.issym():  # older engines write a layer that is there already as a link to it
            member = self._members[os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))]  # noqa: PTH118, PTH120
        content = self._archive.extractfile(member)
        if content is None:
            raise ValueError(f"its {name} is no file")
        return content

    def has(self, name: str) -> bool:
        return name in self._members


class _Plain(_Archive):
    """A tar of the root file system itself."""

    layered = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def layers(self) -> Iterator[IO[bytes]]:
        with self._path.open("rb") as file:
            yield file


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    if path.is_dir():
        yield _Layout(path)
        return
    with tarfile.open(path) as archive:
        saved = _Saved(archive)
        image = saved.has(_MANIFEST) or (saved.has(_INDEX) and saved.has("oci-layout"))
        yield saved if image else _Plain(path)


def _blob(descriptor: dict[str, Any]) -> str:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"


def _chosen(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The image of an index: the only one, or that of this machine's architecture."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    fitting = [found for found in manifests if found.get("platform", {}).get("architecture", machine) == machine]
    if not fitting:
        raise ValueError(f"it holds no image for {machine}")
    return fitting[0]

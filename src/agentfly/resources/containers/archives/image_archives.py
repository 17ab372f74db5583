"""ImageArchive: the layers of an image, in each of the formats of image archives."""

# ruff: noqa: PTH123

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from agentfly.core.threads.run import CancelToken
from agentfly.resources.containers.archives.byte_readers import (
    ByteReader,
    FileSlice,
    HashingReader,
    MalformedArchive,
    open_decompressed,
)
from agentfly.resources.containers.archives.tar_reader import TarEntryType, TarReader

_MANIFEST, INDEX, LAYOUT = "manifest.json", "index.json", "oci-layout"
_NESTED = 4  # an index may name an index
_MOST_FILES = 10_000  # in the archive of an image, each of which may be a layer
_MOST_LAYERS = 1000
_LONGEST_DOCUMENT = 2**22
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class _DockerManifest(BaseModel):
    """An image in the output of ``docker save``."""

    layers: list[str] = Field(alias="Layers")


class _Platform(BaseModel):
    architecture: str | None = None


class _OciDescriptor(BaseModel):
    """A reference in an OCI layout to another document or to a layer."""

    digest: str
    platform: _Platform | None = None


class _OciDocument(BaseModel):
    """An index or a manifest of an OCI layout."""

    layers: list[_OciDescriptor] | None = None
    manifests: list[_OciDescriptor] | None = None


class ImageArchive(ABC):
    """An image in an archive or a directory.

    Attributes:
        has_whiteouts: whether a layer can hide files of the layers below it.
    """

    has_whiteouts: ClassVar[bool]

    @abstractmethod
    def layers(self) -> Iterator[ByteReader]:
        """Yield the layers as plain tars, lowest first. Each must be read before the next.

        Raises:
            ArchiveError: it is not an image.
            OSError: it cannot be read.
        """


@contextmanager
def open_image(path: Path, token: CancelToken, max_length: int) -> Iterator[ImageArchive]:
    """Open an image: an archive of a root file system, the output of ``docker save``, or an OCI layout.

    Args:
        path: the archive, or the directory of a layout.
        token: checked often; it may cancel the work.
        max_length: maximum number of bytes of an archive, decompressed.

    Raises:
        ArchiveError: it is not an image.
        OSError: it cannot be read.
    """
    if path.is_dir():
        yield _OciLayoutDirectory(path, token)
        return
    with path.open("rb") as file:
        content = open_decompressed(FileSlice(file, token), token)
        saved = _ImageTar(content, token, max_length)
        content.seek(0)
        yield saved if saved.is_image else _RootfsTar(content)


def is_layout(path: Path) -> bool:
    """Return whether a path is the directory of an OCI layout."""
    return (path / INDEX).is_file() and (path / LAYOUT).is_file()


class _RootfsTar(ImageArchive):
    """A tar of a root file system."""

    has_whiteouts = False

    def __init__(self, content: ByteReader) -> None:
        self._content = content

    def layers(self) -> Iterator[ByteReader]:
        yield self._content


class _LayeredImage(ImageArchive):
    """An image with a document that lists its layers."""

    has_whiteouts = True

    def __init__(self, token: CancelToken) -> None:
        self._token = token

    @abstractmethod
    def _opened(self, name: str) -> AbstractContextManager[ByteReader]:
        """Open a file of the image."""

    def _read(self, content: ByteReader, name: str) -> bytes:
        """Read a document of the image."""
        document = b""
        while piece := content.read(_LONGEST_DOCUMENT):
            document += piece
            if len(document) > _LONGEST_DOCUMENT:
                raise MalformedArchive(f"its {name} is longer than {_LONGEST_DOCUMENT} bytes")
        return document

    @contextmanager
    def _blob(self, descriptor: _OciDescriptor) -> Iterator[ByteReader]:
        """Open a file of an OCI layout by its digest, which is verified."""
        digest = descriptor.digest
        if _DIGEST.fullmatch(digest) is None:
            raise MalformedArchive(f"it names {digest[:100]!r}, which is no digest")
        algorithm, _, digits = digest.partition(":")
        with self._opened(f"blobs/{algorithm}/{digits}") as content:
            hashed = HashingReader(content, algorithm)
            yield hashed
            if hashed.digest() != digits:
                raise MalformedArchive(f"the content of its blob {digest} has another digest")

    def _of_index(self) -> Iterator[ByteReader]:
        """Yield the layers of the image in the index of an OCI layout."""
        with self._opened(INDEX) as content:
            document = _parsed(_OciDocument, self._read(content, INDEX), INDEX)
        for _ in range(_NESTED):
            if document.layers is not None:
                for layer in _check_layer_count(document.layers):
                    with self._blob(layer) as content:
                        yield open_decompressed(content, self._token)
                return
            chosen = _select_platform(document.manifests or [])
            with self._blob(chosen) as content:
                document = _parsed(_OciDocument, self._read(content, chosen.digest), chosen.digest)
        raise MalformedArchive("its index names no image")


class _OciLayoutDirectory(_LayeredImage):
    """The directory of an OCI layout."""

    def __init__(self, path: Path, token: CancelToken) -> None:
        super().__init__(token)
        self._path = path

    def layers(self) -> Iterator[ByteReader]:
        """See `ImageArchive.layers`."""
        return self._of_index()

    @contextmanager
    def _opened(self, name: str) -> Iterator[ByteReader]:
        try:
            descriptor = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                raise
            raise MalformedArchive(f"its {name} is not there, or is no file") from error
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MalformedArchive(f"its {name} is no file")
            yield FileSlice(file, self._token)


class _ImageTar(_LayeredImage):
    """The output of ``docker save``, an OCI layout in a tar, or another tar."""

    def __init__(self, content: ByteReader, token: CancelToken, max_length: int) -> None:
        super().__init__(token)
        self._content = content
        self._files: dict[str, tuple[int, int]] = {}  # where they begin, and their sizes
        self._links: dict[str, str] = {}
        reader = TarReader(content, max_length=max_length)
        while (member := reader.next()) is not None:
            name = posixpath.normpath(member.name)
            if member.kind is TarEntryType.FILE and not member.sparse:
                self._files[name] = (reader.position, member.size)
            elif member.kind is TarEntryType.SYMLINK:
                self._links[name] = member.target
            if len(self._files) + len(self._links) > _MOST_FILES:
                break  # no image is made of so many

    @property
    def is_image(self) -> bool:
        """Whether the tar has a document that lists layers."""
        return _MANIFEST in self._files or (INDEX in self._files and LAYOUT in self._files)

    def layers(self) -> Iterator[ByteReader]:
        """See `ImageArchive.layers`."""
        if _MANIFEST not in self._files:
            yield from self._of_index()
            return
        with self._opened(_MANIFEST) as content:
            images = _parsed(list[_DockerManifest], self._read(content, _MANIFEST), _MANIFEST)
        if len(images) != 1:
            raise MalformedArchive(f"it holds {len(images)} images; save one alone")
        for name in _check_layer_count(images[0].layers):
            with self._opened(name) as content:
                yield open_decompressed(content, self._token)

    @contextmanager
    def _opened(self, name: str) -> Iterator[ByteReader]:
        name = posixpath.normpath(name)
        if name in self._links:  # older engines write a layer that is there already as a link to it
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), self._links[name]))
        if name not in self._files:
            raise MalformedArchive(f"its {name[:200]!r} is not there, or is no file")
        begin, size = self._files[name]
        yield FileSlice(self._content, self._token, begin, size)


_Any = TypeVar("_Any")
_Parsed = TypeVar("_Parsed")


def _parsed(kind: type[_Parsed], document: bytes, name: str) -> _Parsed:
    try:
        return TypeAdapter(kind).validate_json(document)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "all of it"
        raise MalformedArchive(f"its {name} is not what an image has ({where}: {problem['msg']})") from error


def _check_layer_count(layers: list[_Any]) -> list[_Any]:
    if len(layers) > _MOST_LAYERS:
        raise MalformedArchive(f"it has {len(layers)} layers; the most is {_MOST_LAYERS}")
    return layers


def _select_platform(manifests: list[_OciDescriptor]) -> _OciDescriptor:
    """Return the image of an index: the only one, or the one for this machine's architecture."""
    machine = _MACHINES.get(os.uname().machine, os.uname().machine)
    for found in manifests:
        if found.platform is None or found.platform.architecture in (None, machine):
            return found
    raise MalformedArchive(f"it holds no image for {machine}")

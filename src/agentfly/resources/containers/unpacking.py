"""Unpacking: archives that nobody vouches for, into a directory that nothing in them can leave."""

# an image has many thousands of files, and pathlib is slow
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH113, PTH114, PTH115, PTH123, PTH208, PTH211

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tarfile import InvalidHeaderError, ReadError, TruncatedHeaderError  # type: ignore[attr-defined]
from typing import IO, Literal, Self

_HIDES = ".wh."  # before the name of what a layer hides of those below it
_HIDES_ALL = ".wh..wh..opq"
_MOST_LINKS = 40  # followed for one path, as the kernel does
_LONGEST_NAME = 4096  # bytes, as the kernel's
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_MOST_ATTRIBUTES = 2**20  # bytes of them for one member
_LATEST = 2**40  # seconds; what is no number is not below it
# what `tarfile` lets out of archives that were made to break it, beside its own errors
_BREAKS = (ArithmeticError, LookupError, RecursionError, ValueError)


class TooLarge(Exception):
    """An archive holds more than it may."""


class _Member(tarfile.TarInfo):
    """A member of an archive that ends where it says; `tarfile` takes what is broken off in its middle for whole.

    It takes any size too: a negative one, at which it reads the same member for ever; names and attributes of
    gigabytes, which it reads into memory.
    """

    most_attributes = _MOST_ATTRIBUTES

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        before = tarfile.offset
        try:
            member = super().fromtarfile(tarfile)
        except (TruncatedHeaderError, InvalidHeaderError) as error:
            raise ReadError(f"it is broken off or garbled at byte {tarfile.offset}: {error}") from None
        except _BREAKS as error:
            raise ReadError(f"it is garbled at byte {before}: {error}") from None
        if member.size < 0 or tarfile.offset <= before or max(len(member.name), len(member.linkname)) > _LONGEST_NAME:
            raise ReadError(f"what it says at byte {before} of a name or a size cannot be")
        return member

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        most = {_LONG_NAMES: _LONGEST_NAME + 1, _ATTRIBUTES: cls.most_attributes}
        limit = next((size for kinds, size in most.items() if header.type in kinds), header.size)
        if not 0 <= header.size <= limit:
            raise ReadError(f"it has a header of {header.size} bytes; the most is {limit}")
        return header


class _PlainMember(_Member):
    """A member without attributes, in which `tarfile` may look for a number for hours and keep all threads waiting."""

    most_attributes = 0


def open_archive(file: IO[bytes], mode: Literal["r:", "r|*"], *, attributes: bool = True) -> tarfile.TarFile:
    """A tar to be unpacked, of which every part is checked.

    Args:
        file: where it is.
        mode: how `tarfile` is to read it.
        attributes: whether it may be in the format with extended attributes. Those cannot be read safely, and GNU tar
            makes none unless it is asked to.

    Raises:
        tarfile.TarError: it is none.
    """
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member if attributes else _PlainMember)


class Unpacker:
    """Unpacks archives, one over the other, into one directory, to which nobody else may write meanwhile.

    Links are followed as if that directory were the root of the file system, so whatever names and links an archive
    has, nothing is written outside. Everything belongs to the caller afterwards, without set-user-id bits; devices and
    pipes are left out.

    Attributes:
        left_out: the names of what was not unpacked.
    """

    def __init__(self, root: Path, *, max_bytes: int | None = None, leaving_links: bool = True) -> None:
        """Unpack into a directory that is there.

        Args:
            root: the directory.
            max_bytes: the most that the files may hold together; None for any size.
            leaving_links: whether to keep symbolic links that lead out of the directory, as in the root file systems of
                containers, which mean their own root.
        """
        self.left_out: list[str] = []
        self._root = str(root)
        self._left = max_bytes
        self._leaving_links = leaving_links
        self._directories: dict[str, int] = {}  # and their permissions, set at the end
        self._links: list[str] = []
        self._found: dict[str, str] = {}  # directories by their names in the archive

    def add(self, archive: tarfile.TarFile, *, layer: bool = False) -> None:
        """Unpack an archive over what there is.

        Args:
            archive: what to unpack, from its start.
            layer: whether it is a layer of an image, in which some names say what it hides of the layers below.

        Raises:
            TooLarge: it holds too much.
            tarfile.TarError: it is broken.
            OSError: the disk is full, or a name cannot be.
        """
        fresh: set[str] = set()
        for member in _members(archive):
            parent, _, name = member.name.rstrip("/").rpartition("/")
            directory = self._directory(parent)
            path = f"{directory}/{name}"
            if layer and name.startswith(_HIDES):
                self._hide(directory, name, fresh)
            elif name in ("", ".", ".."):
                continue  # the directory itself, which is there
            else:
                self._place(archive, member, path)
                fresh.add(path)

    def finish(self) -> None:
        """Take away the links that are not to be, and give directories their permissions, which may forbid writing."""
        root = os.path.realpath(self._root)
        for link in () if self._leaving_links else self._links:
            if os.path.islink(link) and not f"{os.path.realpath(link)}/".startswith(f"{root}/"):
                os.unlink(link)
                self.left_out.append(link.removeprefix(f"{self._root}/"))
        for path, mode in sorted(self._directories.items(), reverse=True):
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, mode)

    def _place(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            self._make_directory(path, member.mode)
        elif member.isreg():
            self._remove(path)
            self._write(archive, member, path)
        elif member.islnk():
            parent, _, name = member.linkname.rpartition("/")
            source = f"{self._directory(parent)}/{name}"
            if not os.path.isfile(source) or os.path.islink(source):
                self.left_out.append(member.name)
            elif source != path:
                self._remove(path)
                os.link(source, path)
        elif member.issym():
            self._remove(path)
            os.symlink(member.linkname, path)
            self._links.append(path)
            self._found.clear()
        else:
            self.left_out.append(member.name)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if self._left is not None:
            self._left -= member.size
            if self._left < 0:
                raise TooLarge(member.name)
        content = archive.extractfile(member)
        assert content is not None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            shutil.copyfileobj(content, file, 2**20)
            file.flush()
            os.fchmod(descriptor, member.mode & 0o777)
            if abs(member.mtime) < _LATEST:
                os.utime(descriptor, (member.mtime, member.mtime))

    def _make_directory(self, path: str, mode: int) -> None:
        if os.path.islink(path) and os.path.isdir(self._directory(path[len(self._root) :])):
            return  # a layer may name the directory that a link below it leads to
        if not os.path.isdir(path) or os.path.islink(path):
            self._remove(path)
            os.mkdir(path, 0o700)
        self._directories[path] = (mode & 0o1777) | 0o700

    def _hide(self, directory: str, name: str, fresh: set[str]) -> None:
        """Remove what the layers below have in a directory, by the name of what hides it."""
        if name != _HIDES_ALL:
            self._remove(f"{directory}/{name.removeprefix(_HIDES)}")
            return
        for below in os.listdir(directory):
            if f"{directory}/{below}" not in fresh:
                self._remove(f"{directory}/{below}")

    def _remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
            self._found.clear()
        elif os.path.lexists(path):
            os.unlink(path)
            self._found.clear()

    def _directory(self, name: str) -> str:
        """The directory of a name in an archive, made where it is missing."""
        found = self._found.get(name)
        if found is None:
            found = "/".join((self._root, *self._followed(name)))
            os.makedirs(found, 0o755, exist_ok=True)
            self._found[name] = found
        return found

    def _followed(self, name: str) -> list[str]:
        """A path below the root, with its links followed there."""
        here: list[str] = []
        ahead = name.split("/")[::-1]
        links = 0
        while ahead:
            part = ahead.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del here[-1:]
                continue
            try:
                target = os.readlink("/".join((self._root, *here, part)))
            except OSError:
                here.append(part)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise tarfile.ExtractError(f"{name} leads through too many links")
            if target.startswith("/"):
                here = []
            ahead += target.split("/")[::-1]
        return here


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, of which any number may be looked at: none is kept in memory."""
    while (member := archive.next()) is not None:
        if "\0" in member.name or "\0" in member.linkname:
            raise ReadError(f"the name {member.name!r} holds a NUL")
        yield member
        archive.members.clear()  # type: ignore[attr-defined]

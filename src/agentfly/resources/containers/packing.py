"""Packing: a file or directory of the host as pieces, small enough to be passed into a sandbox one by one."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_PIECE = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Piece:
    """Something to be put down inside.

    Args:
        content: a tar of small things, or a part of a file.
        file: the file that it is a part of, by its path below the copy; empty for the copy itself; None for a tar.
        first: whether it is the first part of the file.
        mode: permissions of the file.
    """

    content: bytes
    file: str | None = None
    first: bool = True
    mode: int = 0


def pieces(source: Path) -> Iterator[Piece]:
    """Take a file or a directory apart. Devices, pipes and sockets in it are left out.

    Raises:
        OSError: something of it cannot be read, or it is neither.
    """
    if source.is_dir():
        yield from _of_directory(source)
    elif stat.S_ISREG(source.stat().st_mode):
        yield from _of_file(source, "")
    else:
        raise OSError(f"{source} is neither a file nor a directory")


def _of_directory(source: Path) -> Iterator[Piece]:
    tar = _Tar()
    ahead = [""]
    while ahead:
        below = ahead.pop()
        folders: list[str] = []
        with os.scandir(source / below) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            inside = f"{below}/{entry.name}" if below else entry.name
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                folders.append(inside)
            if stat.S_ISREG(about.st_mode) and about.st_size > _PIECE:
                yield tar.piece()  # with the directory that it is in
                yield from _of_file(Path(entry.path), inside)
                tar = _Tar()
            elif tar.add(Path(entry.path), inside, about.st_mode) > _PIECE:
                yield tar.piece()
                tar = _Tar()
        ahead += reversed(folders)
    yield tar.piece()


def _of_file(path: Path, inside: str) -> Iterator[Piece]:
    first = True
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        while (content := file.read(_PIECE)) or first:
            yield Piece(content, inside, first, mode)
            first = False


class _Tar:
    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._content, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, path: Path, inside: str, mode: int) -> int:
        """Add a file without what is below it, but no socket, device or pipe; the size that the tar has then."""
        if stat.S_ISREG(mode):
            # it may have become something else: a link is not followed, and a pipe not waited for
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                self._put(self._archive.gettarinfo(arcname=inside, fileobj=file), file)
        elif stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            self._put(self._archive.gettarinfo(path, inside))
        return self._content.tell()

    def _put(self, member: tarfile.TarInfo | None, file: BinaryIO | None = None) -> None:
        if member is None or member.isdev():
            return
        if member.isdir():
            member.mode |= stat.S_IRWXU  # more is to be put into it
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        self._archive.addfile(member, file if member.isreg() else None)

    def piece(self) -> Piece:
        self._archive.close()
        return Piece(self._content.getvalue())

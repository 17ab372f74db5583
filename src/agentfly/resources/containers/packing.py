"""Packing: a file or directory of the host as pieces, small enough to be passed into a sandbox one by one."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    for directory, folders, files in os.walk(source, onerror=_fail):
        below = Path(directory).relative_to(source)
        for name in (*sorted(folders), *sorted(files)):
            path, inside = Path(directory) / name, str(below / name)
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_size > _PIECE:
                yield tar.piece()  # with the directory that it is in
                yield from _of_file(path, inside)
                tar = _Tar()
            elif tar.add(path, inside) > _PIECE:
                yield tar.piece()
                tar = _Tar()
    yield tar.piece()


def _of_file(path: Path, inside: str) -> Iterator[Piece]:
    mode = stat.S_IMODE(path.stat().st_mode) & 0o777
    first = True
    with path.open("rb") as file:
        while (content := file.read(_PIECE)) or first:
            yield Piece(content, inside, first, mode)
            first = False


def _fail(error: OSError) -> None:
    raise error


class _Tar:
    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._content, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, path: Path, inside: str) -> int:
        """Add a file without what is below it; the size that the tar has then."""
        member = self._archive.gettarinfo(path, inside)
        if member is None or member.isdev():  # a socket, a device, a pipe
            return 0
        if member.isdir():
            member.mode |= stat.S_IRWXU  # more is to be put into it
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if member.isreg():
            with path.open("rb") as file:
                self._archive.addfile(member, file)
        else:
            self._archive.addfile(member)
        return self._content.tell()

    def piece(self) -> Piece:
        self._archive.close()
        return Piece(self._content.getvalue())

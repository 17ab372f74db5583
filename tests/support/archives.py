"""Archives for tests: valid ones, and hostile ones that no program writes."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentfly.core.threads.run import CancelToken
from agentfly.resources.containers.archives.byte_readers import FileSlice
from agentfly.resources.containers.archives.tar_reader import TarReader
from agentfly.resources.containers.archives.unpacker import Unpacker, UnpackLimits

DIRECTORY, SYMLINK, HARD_LINK = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
What = bytes | tuple[bytes, str]  # the content of a file; or the type of something else, and its target
Entries = Mapping[str, What] | Iterable[tuple[str, What]]
LIMITS = UnpackLimits(max_bytes=10**6, max_entries=100, max_depth=64)


def tar(entries: Entries, mode: int = 0o4755) -> bytes:
    """An archive of entries in this order; a name may come again."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, what in entries.items() if isinstance(entries, Mapping) else entries:
            member = tarfile.TarInfo(name)
            member.mode = mode
            if isinstance(what, bytes):
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what))
            else:
                member.type, member.linkname = what
                archive.addfile(member)
    return content.getvalue()


def header(name: bytes, kind: bytes, size: int = 0, content: bytes = b"", mtime: int = 0) -> bytes:
    """A member as no program writes it, of any size and time."""
    made = tarfile.TarInfo(name.decode())
    made.type = kind
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    for start, number in ((124, size or len(content)), (136, mtime)):
        block[start : start + 12] = (b"\x80" if number >= 0 else b"\xff") + (number % 256**11).to_bytes(11, "big")
    return summed(block) + content + b"\0" * (-len(content) % 512)


def summed(block: bytes | bytearray) -> bytes:
    """A header with its checksum."""
    made = bytearray(block)
    made[148:156] = b"%06o\0 " % (sum(made) - sum(made[148:156]) + 8 * 32)
    return bytes(made)


def attribute(name: str, value: str) -> bytes:
    """A header with one attribute of the member that follows."""
    rest = f" {name}={value}\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(str(n)))
    return header(b"p", tarfile.XHDTYPE, content=f"{length}{rest}".encode())


def sparse(*regions: tuple[int, int], size: int = 10_000, stored: int = 512, more: bool = False) -> bytes:
    """The header of a sparse file in GNU's own format, with up to four regions."""
    block = bytearray(header(b"s", tarfile.GNUTYPE_SPARSE, stored))
    for number, (place, length) in enumerate(regions):
        block[386 + 24 * number : 410 + 24 * number] = b"%011o\0%011o\0" % (place, length)
    block[482] = more
    block[483:495] = b"%011o\0" % size
    return summed(block)


def sparse_map(blocks: int) -> bytes:
    """A sparse file in GNU's own format, whose map goes on through so many blocks of 21 regions."""
    block = b"".join(b"%011o\0%011o\0" % (2 * n, 1) for n in range(1, 22)) + b"\1" + b"\0" * 7
    return sparse((0, 1), more=True) + block * blocks


def reader(content: bytes) -> TarReader:
    """A reader of an archive in memory."""
    return TarReader(FileSlice(io.BytesIO(content), CancelToken()))


def unpack(
    content: bytes, root: Path, limits: UnpackLimits = LIMITS, *, layer: bool = False, leaving_links: bool = True
) -> list[str]:
    """Unpack an archive; what was left out."""
    with Unpacker(root, limits, leaving_links=leaving_links) as unpacker:
        unpacker.add(reader(content), layer=layer)
        unpacker.remove_escaping_links()
        return unpacker.skipped


def all_of(place: Path) -> dict[str, tuple[object, ...]]:
    """All that can be known of a directory and of what is in it, to be compared with what it was before."""
    found: dict[str, tuple[object, ...]] = {}
    ahead = [place]
    while ahead:
        path = ahead.pop()
        about = path.lstat()
        inside: object = None
        if stat.S_ISDIR(about.st_mode):
            inside = sorted(path.iterdir())
            ahead += inside
        elif stat.S_ISLNK(about.st_mode):
            inside = path.readlink()
        elif stat.S_ISREG(about.st_mode):
            inside = path.read_bytes()
        found[os.fspath(path)] = (about.st_mode, about.st_ino, about.st_nlink, about.st_mtime_ns, inside)
    return found

"""TarReader: the entries of a hostile tar, in bounded time and memory for each.

Python's `tarfile` is not made for hostile archives. It loads names, attributes and maps of sparse files of any size
into memory, and accepts negative sizes. It may look for a number in an extended header for hours, while all threads
wait. So this module reads the formats itself: ustar, GNU's, and POSIX (pax), with sparse files as GNU tar writes them
(in its own format, and as version 1.0 in pax).

Format: https://www.gnu.org/software/tar/manual/html_node/Standard.html, and pax in IEEE Std 1003.1-2017.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from agentfly.resources.containers.archives.byte_readers import CHUNK_SIZE, ByteReader, MalformedArchive

_BLOCK = 512
_LONGEST_NAME = 4096  # bytes, as the kernel's
_LONGEST_HEADER = 2**20  # bytes of attributes of one member
_MOST_HEADERS = 16  # before one member: a name, a target and attributes have one each
_MOST_REGIONS = 2**16  # of a sparse file
_MAX_SIZE = 2**63 - 1
_LATEST = 2**40  # seconds
_TIME = re.compile(rb"-?\d{1,12}(\.\d*)?")
_DECIMAL = re.compile(rb"\d{1,19}")
_OCTAL = re.compile(rb"[0-7]+")
_REGION = 24  # bytes in GNU's map of a sparse file
_IN_HEADER, _IN_BLOCK = 4, 21  # regions


class TarEntryType(Enum):
    """The type of an entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symbolic link"
    HARD_LINK = "hard link"
    OTHER = "something else"


_KINDS = {
    b"\0": TarEntryType.FILE,
    b"0": TarEntryType.FILE,
    b"7": TarEntryType.FILE,
    b"S": TarEntryType.FILE,
    b"1": TarEntryType.HARD_LINK,
    b"2": TarEntryType.SYMLINK,
    b"5": TarEntryType.DIRECTORY,
}
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # whatever size they say


@dataclass(frozen=True)
class TarEntry:
    """An entry of a tar.

    Args:
        name: its name; bytes that are not UTF-8 are decoded as by `os.fsdecode`.
        kind: its type.
        size: bytes of a file, holes included.
        mode: its permissions.
        modified: its modification time, in seconds since the epoch; None if invalid.
        target: the target of a link.
        sparse: whether it is a sparse file. The archive then contains only its parts that are not zeros.
    """

    name: str
    kind: TarEntryType
    size: int = 0
    mode: int = 0
    modified: float | None = None
    target: str = ""
    sparse: bool = False


@dataclass
class _ExtendedHeaders:
    """The extended headers before an entry's own header."""

    name: bytes | None = None
    target: bytes | None = None
    attributes: dict[bytes, bytes] = field(default_factory=dict)


class TarReader:
    """Reads the entries in order."""

    def __init__(self, content: ByteReader, *, max_length: int = _MAX_SIZE) -> None:
        """Begin at the start.

        Args:
            content: the archive.
            max_length: maximum number of bytes to read, skipped ones included.
        """
        self._content = content
        self._max_length = max_length
        self._position = 0
        self._end = 0  # of the present member, with what fills up its last block
        self._regions: tuple[tuple[int, int], ...] = ()  # of it that the archive holds: (place, length), in order
        self._any = False

    @property
    def position(self) -> int:
        """Offset of the current entry's content, until it is read."""
        return self._position

    def next(self) -> TarEntry | None:
        """Return the next entry; None once, at the end.

        Raises:
            MalformedArchive: it is not a tar, or is truncated or malformed.
        """
        self._regions = ()
        self._skip_to_end()
        ahead = _ExtendedHeaders()
        for _ in range(_MOST_HEADERS):
            header = self._header()
            if header is None:
                if ahead != _ExtendedHeaders():
                    raise self._malformed("it is broken off")
                self._finish()
                return None
            kind = header[156:157]
            if kind in b"LKxXg":
                self._read_extended_header(kind, self._small(_number(header[124:136])), ahead)
            else:
                return self._member(header, kind, ahead)
        raise self._malformed("it has too many headers before one member")

    def read_data(self) -> Iterator[tuple[int, bytes]]:
        """Yield the chunks of the current entry, a file, each with its offset in the file.

        Raises:
            MalformedArchive: it is truncated.
        """
        regions, self._regions = self._regions, ()
        for place, length in regions:
            done = 0
            while done < length:
                piece = self._read_some(length - done)
                yield place + done, piece
                done += len(piece)

    def _finish(self) -> None:
        """Read to the end of the last block, which also verifies the checksum of a compressed archive."""
        while self._read_some(CHUNK_SIZE, at_end=True):
            pass

    # --- one member -------------------------------------------------------------------------------------------------

    def _header(self) -> bytes | None:
        header = self._read(_BLOCK, at_end=True)
        if not header:
            if not self._any:
                raise self._malformed("it is empty")
            return None
        if header.count(0) == _BLOCK:
            return None
        said, total = _number(header[148:156]), sum(header) - sum(header[148:156]) + 8 * 32
        if said != total and said != total - 256 * sum(byte >> 7 for byte in header):  # some add up signed bytes
            raise self._malformed("it is no tar" if not self._any else "it is garbled")
        self._any = True
        return header

    def _read_extended_header(self, kind: bytes, content: bytes, ahead: _ExtendedHeaders) -> None:
        if kind == b"L":
            ahead.name = self._long(content)
        elif kind == b"K":
            ahead.target = self._long(content)
        elif kind != b"g":  # of all members: nothing that matters here can be the same for all
            ahead.attributes = self._attributes(content)

    def _long(self, content: bytes) -> bytes:
        if len(content) > _LONGEST_NAME + 1:
            raise self._malformed("it has a name that is too long")
        return content.partition(b"\0")[0]

    def _attributes(self, content: bytes) -> dict[bytes, bytes]:
        """Return the records of an extended header. Each has the form "LENGTH NAME=VALUE" with a line end."""
        found: dict[bytes, bytes] = {}
        position = 0
        while position < len(content):
            digits = content[position : position + 8].partition(b" ")[0]
            length = int(digits) if digits.isdigit() else 0
            record = content[position : position + length]
            name, equals, value = record[len(digits) + 1 : -1].partition(b"=")
            if len(record) != length or not equals or not record.endswith(b"\n"):
                raise self._malformed("it has an extended header that is garbled")
            found[name] = value
            position += length
        return found

    def _member(self, header: bytes, kind: bytes, ahead: _ExtendedHeaders) -> TarEntry:
        said = ahead.attributes
        stored = _decimal(said[b"size"]) if said.get(b"size") else _number(header[124:136])
        if not 0 <= stored <= _MAX_SIZE:
            raise self._malformed("it says a size that cannot be")
        name = said.get(b"path") or ahead.name or _name(header)
        if kind == b"\0" and name.endswith(b"/"):
            kind = b"5"
        member = TarEntry(
            name=self._checked(name),
            kind=_KINDS.get(kind, TarEntryType.OTHER),
            size=0 if kind in _WITHOUT_CONTENT else stored,
            mode=_number(header[100:108]) & 0o7777,
            modified=_time(said.get(b"mtime"), header[136:148]),
            target=self._checked(said.get(b"linkpath") or ahead.target or _text(header[157:257])),
        )
        if member.kind is not TarEntryType.FILE:
            return self._start_entry(member, member.size)
        if kind == b"S":
            return self._sparse(member, header)
        if any(attribute.startswith(b"GNU.sparse.") for attribute in said):
            return self._posix_sparse(member, said)
        self._regions = ((0, stored),) if stored else ()
        return self._start_entry(member, stored)

    def _start_entry(self, member: TarEntry, stored: int) -> TarEntry:
        """Start an entry, followed by `stored` bytes of content."""
        self._end = self._position + stored + -stored % _BLOCK
        return member

    def _checked(self, name: bytes) -> str:
        if b"\0" in name:
            raise self._malformed(f"the name {name[:100]!r} in it holds a NUL")
        if len(name) > _LONGEST_NAME:
            raise self._malformed("it has a name that is too long")
        return os.fsdecode(name)

    # --- sparse files -----------------------------------------------------------------------------------------------

    def _sparse(self, member: TarEntry, header: bytes) -> TarEntry:
        """Start a sparse file in GNU's own format. Its map continues in blocks after the header."""
        found = self._regions_in(header[386:], _IN_HEADER)
        size = _number(header[483:495])
        more, blocks = header[482], 0
        while more:
            blocks += 1
            if blocks > _MOST_REGIONS // _IN_BLOCK:
                raise self._malformed(f"it has a sparse file of more than {_MOST_REGIONS} parts")
            block = self._read(_BLOCK)
            found += self._regions_in(block, _IN_BLOCK)
            more = block[504]
        self._regions = self._regions_checked(found, size, member.size)
        return self._start_entry(replace(member, size=size, sparse=True), member.size)

    def _regions_in(self, block: bytes, count: int) -> list[tuple[int, int]]:
        found = []
        for start in range(0, count * _REGION, _REGION):
            place, length = block[start : start + 12], block[start + 12 : start + _REGION]
            if not any(place) and not any(length):
                break
            found.append((_number(place), _number(length)))
        return found

    def _posix_sparse(self, member: TarEntry, said: dict[bytes, bytes]) -> TarEntry:
        """Start a sparse file in the POSIX format. Its map precedes its content."""
        if (said.get(b"GNU.sparse.major"), said.get(b"GNU.sparse.minor")) != (b"1", b"0"):
            raise self._malformed("it has a sparse file in an old format; make it by GNU tar 1.27 or newer")
        size = _decimal(said.get(b"GNU.sparse.realsize", b""))
        name = said.get(b"GNU.sparse.name")
        begin = self._position
        lines = self._lines(member.size)
        count = next(lines)
        if count > _MOST_REGIONS:
            raise self._malformed(f"it has a sparse file of more than {_MOST_REGIONS} parts")
        regions = [(next(lines), next(lines)) for _ in range(count)]
        stored = member.size - (self._position - begin)
        self._regions = self._regions_checked(regions, size, stored)
        shown = self._checked(name) if name else member.name
        return self._start_entry(replace(member, name=shown, size=size, sparse=True), stored)

    def _lines(self, most: int) -> Iterator[int]:
        """Yield the numbers of a map, one per line, from whole blocks; at most `most` bytes."""
        rest = b""
        while True:
            line, end, behind = rest.partition(b"\n")
            if end:
                rest = behind
                yield _decimal(line)
                continue
            if len(rest) > _BLOCK or most < _BLOCK:
                raise self._malformed("it has a map of a sparse file that is garbled")
            rest += self._read(_BLOCK)
            most -= _BLOCK

    def _regions_checked(self, regions: list[tuple[int, int]], size: int, stored: int) -> tuple[tuple[int, int], ...]:
        end = 0
        for place, length in regions:
            if place < end or length < 0:
                raise self._malformed("it has a map of a sparse file whose parts overlap")
            end = place + length
        if not end <= size <= _MAX_SIZE or sum(length for _, length in regions) != stored:
            raise self._malformed("it has a map of a sparse file that does not fit its size")
        return tuple(region for region in regions if region[1])

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _small(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise self._malformed(f"it has a header of {size} bytes; the most is {_LONGEST_HEADER}")
        content = self._read(size)
        self._read(-size % _BLOCK)
        return content

    def _read_some(self, most: int, *, at_end: bool = False) -> bytes:
        """Return the next bytes, at least one; empty only if the archive may end here."""
        piece = self._content.read(min(most, CHUNK_SIZE, self._max_length - self._position))
        if not piece:
            if self._position >= self._max_length:
                raise self._malformed(f"it is longer than {self._max_length} bytes")
            if not at_end:
                raise self._malformed("it is broken off")
        self._position += len(piece)
        return piece

    def _read(self, size: int, *, at_end: bool = False) -> bytes:
        pieces: list[bytes] = []
        left = size
        while left > 0:
            piece = self._read_some(left, at_end=at_end and not pieces)
            if not piece:
                return b""
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _skip_to_end(self) -> None:
        """Skip to the end of the current entry, which must exist."""
        if self._end <= self._position:
            return
        if self._end > self._max_length:
            raise self._malformed(f"it is longer than {self._max_length} bytes")
        self._content.seek(self._end - 1)
        if not self._content.read(1):
            raise self._malformed("it is broken off")
        self._position = self._end

    def _malformed(self, why: str) -> MalformedArchive:
        return MalformedArchive(f"{why} (at byte {self._position})")


def _number(field: bytes) -> int:
    """Parse a number of a header: octal digits, or GNU's form for large and negative numbers."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    digits = _text(field).strip()
    if not digits:
        return 0
    if _OCTAL.fullmatch(digits) is None:
        raise MalformedArchive(f"it has a header in which {digits!r} should be a number")
    return int(digits, 8)


def _decimal(text: bytes) -> int:
    """Parse a number of an extended header or of a map."""
    if _DECIMAL.fullmatch(text) is None:
        raise MalformedArchive(f"it has an attribute in which {text[:40]!r} should be a number")
    return int(text)


def _time(attribute: bytes | None, field: bytes) -> float | None:
    """Parse a modification time; None if no file can have it."""
    if attribute:
        return float(attribute) if _TIME.fullmatch(attribute) else None
    seconds = _number(field)
    return seconds if abs(seconds) < _LATEST else None


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _name(header: bytes) -> bytes:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name

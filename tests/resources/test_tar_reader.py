"""TarReader: it reads what GNU tar writes, and refuses hostile archives in bounded work."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import tarfile
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.threads.run import CancelToken
from agentfly.resources.containers.archives.byte_readers import (
    FileSlice,
    HashingReader,
    MalformedArchive,
    open_decompressed,
)
from agentfly.resources.containers.archives.tar_reader import TarEntryType, TarReader
from agentfly.resources.containers.archives.unpacker import UnpackLimits
from tests.support.archives import attribute, header, reader, sparse, summed, tar, unpack

# --- honest archives --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind, two of them with many holes."""
    place = tmp_path_factory.mktemp("source")
    deep = place / ("n" * 120) / ("m" * 150)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")
    (place / "umläut").write_text("ü")
    (place / os.fsdecode(b"\xff\xfe")).write_bytes(b"no text")
    (place / "program").write_bytes(b"#!" * 5000)
    (place / "program").chmod(0o4755)
    with (place / "sparse").open("wb") as file:
        for number in range(60):
            file.seek(number * 20_000)
            file.write(b"x" * (number + 1))
        file.truncate(2_000_000)
    with (place / "hole").open("wb") as file:
        file.truncate(500_000)
    (place / "empty").touch()
    (place / "link").symlink_to("k" * 90 + "/" + "l" * 90)
    os.link(place / "program", place / "same")
    os.mkfifo(place / "pipe")
    for path in place.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)
    return place


def read(content: bytes) -> list[tuple[Any, ...]]:
    """All that is in an archive."""
    archive, found = reader(content), []
    while (member := archive.next()) is not None:
        held = bytearray(member.size)
        for position, piece in archive.read_data():
            held[position : position + len(piece)] = piece
        found.append((member.name.rstrip("/"), member.kind.value, member.mode, member.size, member.target, bytes(held)))
    return found


def read_by_tarfile(content: bytes) -> list[tuple[Any, ...]]:
    kinds = {
        tarfile.DIRTYPE: TarEntryType.DIRECTORY,
        tarfile.SYMTYPE: TarEntryType.SYMLINK,
        tarfile.LNKTYPE: TarEntryType.HARD_LINK,
    }
    found = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            kind = TarEntryType.FILE if member.isreg() else kinds.get(member.type, TarEntryType.OTHER)
            file = archive.extractfile(member) if member.isreg() else None
            held = file.read() if file is not None else b""
            size = member.size if member.isreg() else 0
            found.append((member.name, kind.value, member.mode & 0o7777, size, member.linkname, held))
    return found


@pytest.mark.parametrize(
    "options", [("gnu",), ("gnu", "-S"), ("oldgnu", "-S"), ("posix",), ("posix", "-S"), ("ustar",), ("v7",)]
)
def test_what_gnu_tar_writes_is_read_as_it_is(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["tar", "-C", source, f"--format={options[0]}", *options[1:], "-cf", "-", "."], check=False, capture_output=True
    )
    found = read(done.stdout)
    assert found == read_by_tarfile(done.stdout)
    assert len(found) >= 8  # the older formats have no long names and no pipes


def test_what_is_unpacked_is_what_was_packed(source: Path, tmp_path: Path) -> None:
    packed = subprocess.run(["tar", "-C", source, "-cSf", "-", "."], check=True, capture_output=True).stdout
    assert unpack(packed, tmp_path, UnpackLimits(10**7, 100, 10)) == ["./pipe"]
    (tmp_path / "link").unlink()
    told = subprocess.run(
        ["diff", "-r", "--exclude=pipe", "--exclude=link", source, tmp_path], check=False, capture_output=True
    )
    assert told.stdout == b""
    assert (tmp_path / "program").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "same").samefile(tmp_path / "program")
    assert (tmp_path / "sparse").stat().st_mtime == 1_700_000_000
    assert (tmp_path / "sparse").stat().st_blocks * 512 < 1_000_000


def _twice(content: bytes) -> bytes:
    return gzip.compress(content[:3000]) + gzip.compress(content[3000:]) + b"\0" * 512


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, _twice, bz2.compress, lzma.compress, lambda content: lzma.compress(content, lzma.FORMAT_ALONE)],
    ids=["gzip", "two streams", "bzip2", "xz", "lzma"],
)
def test_what_is_compressed_is_read_from_any_place_on(compress: Callable[[bytes], bytes]) -> None:
    content = os.urandom(300_000) + b"\0" * 300_000
    opened = open_decompressed(FileSlice(io.BytesIO(compress(content)), CancelToken()), CancelToken())
    for place in (0, 1, 299_990, 17, 599_999, 2):
        opened.seek(place)
        assert opened.read(10) == content[place : place + 10]
    opened.seek(0)
    assert b"".join(iter(lambda: opened.read(100_000), b"")) == content
    opened.seek(10**9)
    assert opened.read(1) == b""


def test_a_digest_is_of_all_bytes_whatever_was_read_of_them() -> None:
    content = os.urandom(10_000)
    hashed = HashingReader(FileSlice(io.BytesIO(b"before" + content + b"after"), CancelToken(), 6, 10_000), "sha256")
    hashed.read(100)
    hashed.seek(0)
    hashed.seek(5000)
    assert hashed.read(10) == content[5000:5010]
    assert hashed.digest() == hashlib.sha256(content).hexdigest()


# --- archives that were made to break a reader ------------------------------------------------------------------------

FILE = header(b"f", tarfile.REGTYPE, content=b"x")
HUGE = b"1" * 200_000


def _posix_sparse(text: bytes, size: str = "10000", stored: int = 1024) -> bytes:
    said = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", size)]
    records = b"".join(attribute(name, value)[512:].rstrip(b"\0") for name, value in said)
    about = header(b"p", tarfile.XHDTYPE, content=records)
    return about + header(b"s", tarfile.REGTYPE, stored) + text + b"\0" * (stored - len(text))


GARBLED = {
    "no archive": b"1" * 100_000,
    "a wrong checksum": FILE + b"9" + FILE[1:],
    "a number that is none": summed(FILE[:124] + b"9z" + FILE[126:]),
    "a size below zero": header(b"f", tarfile.REGTYPE, -512) + FILE,
    "a size further below zero": FILE + header(b"f", tarfile.REGTYPE, -1536),
    "a size beyond any": header(b"f", tarfile.REGTYPE, 2**70) + FILE,
    "a size below zero in an attribute": FILE + attribute("size", "-1024") + FILE,
    "a size of many digits": attribute("size", "1" * 5000) + FILE,
    "a name of a gigabyte": header(b"n", tarfile.GNUTYPE_LONGNAME, 2**30),
    "a name of a negative length": header(b"n", tarfile.GNUTYPE_LONGNAME, -1) + FILE,
    "a name longer than any": header(b"n", tarfile.GNUTYPE_LONGNAME, content=b"a/" * 100_000) + FILE,
    "a name longer than any in an attribute": attribute("path", "a/" * 100_000) + FILE,
    "a target longer than any": header(b"n", tarfile.GNUTYPE_LONGLINK, content=b"a/" * 100_000) + FILE,
    "a name with a NUL": attribute("path", "a\0b") + FILE,
    "a chain without end": attribute("a", "b") * 3000 + FILE,
    "attributes of a gigabyte": header(b"p", tarfile.XHDTYPE, 2**30) + FILE,
    "attributes that are a number": header(b"p", tarfile.XHDTYPE, content=HUGE) + FILE,
    "attributes of no length": header(b"p", tarfile.XHDTYPE, content=b"0 a=b\n") + FILE,
    "attributes beyond their end": header(b"p", tarfile.XHDTYPE, content=b"99 a=b\n") + FILE,
    "attributes without a name": header(b"p", tarfile.XHDTYPE, content=b"5 abc") + FILE,
    "an old map": attribute("GNU.sparse.map", "a,b") + FILE,
    "a map of regions that overlap": sparse((0, 256), (100, 256)) + b"x" * 512,
    "a map of regions out of order": sparse((512, 256), (0, 256)) + b"x" * 512,
    "a map beyond the size": sparse((0, 256), (9_900, 256)) + b"x" * 512,
    "a map of more than there is": sparse((0, 512), (9_000, 512)) + b"x" * 512,
    "a map that does not end": sparse((0, 512), more=True) + (b"\0" * 504 + b"\1" + b"\0" * 7) * 4000,
    "a map of very many regions": sparse((0, 1), more=True)
    + b"".join(
        b"".join(b"%011o\0%011o\0" % (2 * n, 1) for n in range(start, start + 21)) + b"\1" + b"\0" * 7
        for start in range(1, 80_000, 21)
    ),
    "a map without numbers": _posix_sparse(b"a\nb\n"),
    "a map without lines": _posix_sparse(b"1" * 1024),
    "a map of a billion": _posix_sparse(b"1000000000\n"),
    "a map longer than its file": _posix_sparse(b"3\n1\n1\n", stored=512),
    "a size of a sparse file that is none": _posix_sparse(b"0\n", size="x"),
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=[*GARBLED])
def test_an_archive_made_to_break_its_reader_is_refused_as_broken(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(MalformedArchive, match=r"^(?!.*broken off)"):
        unpack(content + b"\0" * 1024, tmp_path)


BROKEN_OFF = {
    "nothing": b"",
    "a header": FILE + FILE[:100],
    "a file": header(b"f", tarfile.REGTYPE, 1000) + b"x" * 10,
    "something passed over": header(b"f", b"Z", 1000) + b"x" * 10,
    "a name": header(b"n", tarfile.GNUTYPE_LONGNAME, content=b"n" * 600)[:600],
    "a name without a member": header(b"n", tarfile.GNUTYPE_LONGNAME, content=b"n" * 600),
    "a map": sparse((0, 512), more=True),
}


@pytest.mark.parametrize("content", BROKEN_OFF.values(), ids=[*BROKEN_OFF])
def test_an_archive_that_is_broken_off_is_refused_wherever_that_is(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(MalformedArchive, match=r"broken off|is empty"):
        unpack(content, tmp_path)


class _Counted(io.BytesIO):
    """Counts what is read."""

    asked = 0

    def read(self, size: int | None = -1, /) -> bytes:
        piece = super().read(size)
        self.asked += len(piece)
        return piece


def test_of_what_says_that_it_is_huge_no_more_is_read_than_its_header() -> None:
    for content in (
        header(b"n", tarfile.GNUTYPE_LONGNAME, 2**30),
        header(b"p", tarfile.XHDTYPE, 2**30),
        _posix_sparse(b"1000000000\n"),
        sparse((0, 512), more=True),
    ):
        file = _Counted(content + b"1" * 2**23)
        with pytest.raises(MalformedArchive):
            TarReader(FileSlice(file, CancelToken())).next()
        assert file.asked < 2**21 + 4096


def test_no_more_is_read_than_an_archive_may_have() -> None:
    archive = TarReader(FileSlice(io.BytesIO(tar({"a": b"x" * 3000, "b": b"y"})), CancelToken()), max_length=2000)
    assert archive.next() is not None
    with pytest.raises(MalformedArchive, match="longer than 2000 bytes"):
        archive.next()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("spoil", [lambda packed: packed[:-20], lambda packed: packed[:40] + b"?" * 9 + packed[49:]])
def test_what_is_compressed_and_garbled_or_broken_off_is_refused(
    compress: Callable[[bytes], bytes], spoil: Callable[[bytes], bytes]
) -> None:
    content = spoil(compress(tar({"f": os.urandom(5000)})))
    archive = TarReader(open_decompressed(FileSlice(io.BytesIO(content), CancelToken()), CancelToken()))
    with pytest.raises(MalformedArchive):
        deque(iter(archive.next, None), maxlen=0)


def test_what_is_compressed_in_another_way_is_refused_with_the_cure() -> None:
    with pytest.raises(MalformedArchive, match="'zstd -d'"):
        open_decompressed(FileSlice(io.BytesIO(b"\x28\xb5\x2f\xfd" + b"x" * 100), CancelToken()), CancelToken())


def test_what_is_compressed_a_thousandfold_takes_the_memory_of_a_piece() -> None:
    packed = gzip.compress(b"\0" * 2**24)
    opened = open_decompressed(FileSlice(io.BytesIO(packed), CancelToken()), CancelToken())
    tracemalloc.start()
    try:
        opened.seek(2**24)
        assert opened.read(1) == b""
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()

"""Images as archives: unpacked once, whole or not at all, and never outside their directory."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ResourceStartError
from agentfly.resources.containers import images
from agentfly.resources.containers.bubblewrap.tiers import probe
from agentfly.resources.containers.images import prepare, root_directory
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.unpacking import TooLarge, Unpacker, open_archive
from agentfly.resources.engine import ResourceEngine

Entries = dict[str, bytes | tuple[bytes, str]]  # content of a file; or the type of something else, and its target
BASE: Entries = {
    "bin": (tarfile.SYMTYPE, "usr/bin"),
    "usr/bin/bash": b"#!shell",
    "etc/old": b"old",
    "etc/kept": b"kept",
    "opt/a/one": b"1",
    "opt/a/two": b"2",
    "etc/alternatives/sh": (tarfile.SYMTYPE, "/usr/bin/bash"),
}
OVER: Entries = {
    "bin/more": b"more",  # through the link of the layer below
    "etc/.wh.old": b"",
    "opt/a/three": b"3",
    "opt/a/.wh..wh..opq": b"",
    "usr/bin/again": (tarfile.LNKTYPE, "usr/bin/bash"),
}


def tar(entries: Entries) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, what in entries.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o4755
            if isinstance(what, bytes):
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what))
            else:
                member.type, member.linkname = what
                archive.addfile(member)
    return content.getvalue()


def blob(content: bytes) -> tuple[str, str]:
    digest = hashlib.sha256(content).hexdigest()
    return f"blobs/sha256/{digest}", f"sha256:{digest}"


def layout(*layers: bytes) -> Entries:
    """An OCI image layout, whose index names another."""
    files: Entries = {"oci-layout": b"{}"}

    def put(content: bytes, **about: Any) -> dict[str, Any]:
        name, digest = blob(content)
        files[name] = content
        return {"digest": digest, "size": len(content), **about}

    manifest = {"layers": [put(layer) for layer in layers]}
    image = put(json.dumps(manifest).encode(), platform={"architecture": "amd64"})
    other = {"digest": "sha256:none", "size": 0, "platform": {"architecture": "vax"}}
    inner = put(json.dumps({"manifests": [other, {**image, "platform": {}}]}).encode())
    files["index.json"] = json.dumps({"manifests": [inner]}).encode()
    return files


def saved(*layers: bytes) -> Entries:
    """What ``docker save`` writes."""
    files: Entries = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    files["manifest.json"] = json.dumps([{"Config": "c.json", "Layers": list(files)}]).encode()
    return files


def write_layout(path: Path, entries: Entries) -> Path:
    for name, content in entries.items():
        assert isinstance(content, bytes)
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


LAYERS = (tar(BASE), gzip.compress(tar(OVER)))
MAKERS: dict[str, Callable[[Path], Path]] = {
    "docker save": lambda place: write(place / "saved.tar", tar(saved(*LAYERS))),
    "docker save, compressed": lambda place: write(place / "saved.tgz", gzip.compress(tar(saved(*LAYERS)))),
    "OCI layout in a tar": lambda place: write(place / "oci.tar", tar(layout(*LAYERS))),
    "OCI layout as a directory": lambda place: write_layout(place / "oci", layout(*LAYERS)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_layers_are_laid_over_each_other_with_what_they_hide(tmp_path: Path, kind: str) -> None:
    image = str(MAKERS[kind](tmp_path))
    prepare(image)
    root = root_directory(image)
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert found == {
        "usr/bin/bash",
        "usr/bin/more",
        "usr/bin/again",
        "etc/kept",
        "opt/a/three",
        "etc/alternatives/sh",
    }
    assert (root / "etc/alternatives/sh").readlink() == Path("/usr/bin/bash")
    assert (root / "usr/bin/again").samefile(root / "usr/bin/bash")
    assert (root / "usr/bin/bash").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_a_tar_of_a_root_file_system_is_an_image(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    image = str(write(tmp_path / "root.tar", pack(tar(BASE))))
    prepare(image)
    assert (root_directory(image) / "etc" / "old").read_bytes() == b"old"


def test_the_same_content_is_unpacked_once_and_a_changed_archive_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = []
    add = Unpacker.add
    monkeypatch.setattr(Unpacker, "add", lambda *args, **more: (unpacked.append(1), add(*args, **more))[1])
    first, second = write(tmp_path / "a.tar", tar(BASE)), write(tmp_path / "b.tar", tar(BASE))
    for image in (first, second, first, second):
        prepare(str(image))
    assert root_directory(str(first)) == root_directory(str(second))
    assert len(unpacked) == 1
    write(first, tar({**BASE, "etc/new": b"new"}))
    prepare(str(first))
    assert (root_directory(str(first)) / "etc" / "new").exists()
    assert not (root_directory(str(second)) / "etc" / "new").exists()


def test_processes_that_want_the_same_image_wait_for_one_of_them(tmp_path: Path, cache: Path) -> None:
    image = write(tmp_path / "a.tar", tar({**BASE, **{f"many/{n}": b"x" for n in range(300)}}))
    program = "import sys; from agentfly.resources.containers.images import *; prepare(sys.argv[1])"
    program += "; print(root_directory(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(image)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len([path for path in cache.iterdir() if path.is_dir() and not path.is_symlink()]) == 1


def test_what_a_killed_process_left_half_unpacked_is_never_used(tmp_path: Path, cache: Path) -> None:
    image = write(tmp_path / "a.tar", tar(BASE))
    prepare(str(image))
    whole = root_directory(str(image))
    for link in [path for path in cache.iterdir() if path.is_symlink()]:
        link.unlink()
    whole.rename(cache / f".{whole.name}")
    (cache / f".{whole.name}" / "half").touch()
    with pytest.raises(ResourceStartError, match="no directory with an unpacked root file system"):
        root_directory(str(image))
    prepare(str(image))
    assert not (root_directory(str(image)) / "half").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no archive at all", "could not be unpacked"),
        (tar(BASE)[:700], "could not be unpacked"),
        (tar({"manifest.json": b"[]"}), "holds 0 images"),
        (tar(saved(b"broken")), "could not be unpacked"),
        (tar({"manifest.json": json.dumps([{"Layers": ["none"]}]).encode()}), "could not be unpacked"),
    ],
)
def test_a_broken_archive_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, content: bytes, words: str
) -> None:
    with pytest.raises(ResourceStartError, match=words):
        prepare(str(write(tmp_path / "broken.tar", content)))
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_directory_needs_no_preparation_and_must_have_a_shell(tmp_path: Path) -> None:
    prepare(str(tmp_path))
    with pytest.raises(ResourceStartError, match="has /bin/bash"):
        root_directory(str(tmp_path))
    with pytest.raises(ResourceStartError, match="has /bin/bash"):
        root_directory("/no/such/image")


# --- unpacking what nobody vouches for --------------------------------------------------------------------------------

EVIL: list[Entries] = [
    {"../../victim/in": b"x"},
    {"/victim/in": b"x"},
    {"a": (tarfile.SYMTYPE, "VICTIM"), "a/in": b"x"},
    {"a": (tarfile.SYMTYPE, "../victim"), "a/in": b"x"},
    {"d/e/f": b"", "a": (tarfile.SYMTYPE, "d/e"), "a/../../../victim/in": b"x"},
    {"a": (tarfile.SYMTYPE, "VICTIM/file"), "./a": b"x", "b": (tarfile.LNKTYPE, "VICTIM/file")},
    {"a": (tarfile.LNKTYPE, "../victim/file")},
    {"a": (tarfile.SYMTYPE, "VICTIM"), ".wh.a": b"", "a/.wh.file": b"", "a/.wh..wh..opq": b""},
    {"x": (tarfile.SYMTYPE, "VICTIM"), "x/.wh..wh..opq": b""},
    {"dev": (tarfile.CHRTYPE, ""), "pipe": (tarfile.FIFOTYPE, "")},
    {"a": (tarfile.SYMTYPE, "a"), "b": b"x"},
]


@pytest.mark.parametrize("number", range(len(EVIL)))
@pytest.mark.parametrize("leaving_links", [False, True])
def test_nothing_is_written_or_removed_outside(tmp_path: Path, number: int, leaving_links: bool) -> None:
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.mkdir()
    target.mkdir()
    (victim / "file").write_text("untouched")
    entries: Entries = {
        name: what if isinstance(what, bytes) else (what[0], what[1].replace("VICTIM", str(victim)))
        for name, what in EVIL[number].items()
    }
    unpacker = Unpacker(target, leaving_links=leaving_links)
    with tarfile.open(fileobj=io.BytesIO(tar(entries))) as archive:
        unpacker.add(archive, layer=True)
    unpacker.finish()
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "untouched"
    assert (victim / "file").stat().st_nlink == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"victim", "target", "cache"}
    if not leaving_links:
        links = [path for path in target.rglob("*") if path.is_symlink()]
        assert all(Path(os.path.realpath(link)).is_relative_to(target.resolve()) for link in links)


def test_a_path_through_too_many_links_is_refused(tmp_path: Path) -> None:
    unpacker = Unpacker(tmp_path)
    entries: Entries = {"a": (tarfile.SYMTYPE, "b"), "b": (tarfile.SYMTYPE, "a"), "a/c": b""}
    with tarfile.open(fileobj=io.BytesIO(tar(entries))) as archive, pytest.raises(tarfile.TarError, match="links"):
        unpacker.add(archive)


def test_a_sparse_giant_is_too_large(tmp_path: Path) -> None:
    giant = tmp_path / "giant"
    with giant.open("wb") as file:
        file.truncate(10**12)
    subprocess.run(["tar", "-C", tmp_path, "-cSf", tmp_path / "giant.tar", "giant"], check=True)
    giant.unlink()
    (tmp_path / "target").mkdir()
    with tarfile.open(tmp_path / "giant.tar") as archive, pytest.raises(TooLarge):
        Unpacker(tmp_path / "target", max_bytes=10**6).add(archive)


def header(name: bytes, kind: bytes, size: int = 0, content: bytes = b"", mtime: int = 0) -> bytes:
    """A member of a tar as nobody's program writes it."""
    made = tarfile.TarInfo(name.decode())
    made.type = kind
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    for start, number in ((124, size or len(content)), (136, mtime)):
        block[start : start + 12] = (b"\x80" if number >= 0 else b"\xff") + (number % 256**11).to_bytes(11, "big")
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * 32)
    return bytes(block) + content + b"\0" * (-len(content) % 512)


def attribute(name: str, value: str) -> bytes:
    rest = f" {name}={value}\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(str(n)))
    return header(b"p", tarfile.XHDTYPE, content=f"{length}{rest}".encode())


FILE = header(b"f", tarfile.REGTYPE, content=b"x")
SPARSE = attribute("GNU.sparse.map", "a,b") + attribute("GNU.sparse.size", "z")
GARBLED = {
    "a size below zero": header(b"f", tarfile.REGTYPE, -512) + FILE,
    "a size further below zero": FILE + header(b"f", tarfile.REGTYPE, -1536),
    "a size below zero in an attribute": FILE + attribute("size", "-1024") + FILE,
    "a name of a gigabyte": header(b"n", tarfile.GNUTYPE_LONGNAME, 2**30),
    "a name longer than any": header(b"n", tarfile.GNUTYPE_LONGNAME, content=b"a/" * 100_000) + FILE,
    "a name longer than any in an attribute": attribute("path", "a/" * 100_000) + FILE,
    "a name with a NUL": attribute("path", "a\0b") + FILE,
    "a chain without end": attribute("a", "b") * 3000 + FILE,
    "a map that is none": SPARSE + FILE,
}


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("content", GARBLED.values(), ids=[*GARBLED])
def test_an_archive_made_to_break_whoever_reads_it_is_refused_as_broken(
    tmp_path: Path, content: bytes, attributes: bool
) -> None:
    file = io.BytesIO(content + b"\0" * 1024)
    with pytest.raises(tarfile.TarError), open_archive(file, "r:", attributes=attributes) as archive:
        Unpacker(tmp_path).add(archive)


def test_a_time_that_no_file_can_have_is_not_kept(tmp_path: Path) -> None:
    times = [attribute("mtime", value) + FILE for value in ("inf", "nan", "1e300")]
    file = io.BytesIO(b"".join(times) + header(b"g", tarfile.REGTYPE, mtime=2**80) + b"\0" * 1024)
    with open_archive(file, "r:") as archive:
        Unpacker(tmp_path).add(archive)
    assert (tmp_path / "f").read_bytes() == b"x"


def test_of_a_sandbox_no_attributes_are_read_in_which_a_search_could_take_hours() -> None:
    file = io.BytesIO(header(b"p", tarfile.XHDTYPE, content=b"1" * 200_000) + FILE + b"\0" * 1024)
    with pytest.raises(tarfile.TarError, match="header of 200000 bytes"):
        open_archive(file, "r:", attributes=False).next()


# --- the whole of it --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))
async def test_a_real_root_file_system_in_an_archive_is_prepared_by_the_engine_and_runs(
    debian: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(debian.parent / "unpacked"))  # for the next run too
    spec = ContainerSpec(image=str(debian), memory="512MiB", capacity=2, backend="bubblewrap")
    async with ResourceEngine() as engine:
        leases = await asyncio.gather(*(engine.acquire(spec, f"owner-{n}") for n in range(2)))
        for lease in leases:
            result = await lease.resource.run("cat /etc/debian_version; python3 -c 'print(6 * 7)'; git --version")
            assert "42\ngit version" in result.stdout
            written = await lease.resource.run("echo x > /usr/bin/new && cat /usr/bin/new")
            assert written.stdout == ("x\n" if probe().writable_system or os.geteuid() else "")
            await engine.release(lease)
    assert not (images.root_directory(str(debian)) / "usr" / "bin" / "new").exists()

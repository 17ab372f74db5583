"""Unpacking: no archive touches anything outside the directory, and the work is bounded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agentfly.core.threads.run import CancelToken, WorkCancelled, run_in_cancellable_thread
from agentfly.resources.containers.archives import unpacker as unpacking
from agentfly.resources.containers.archives.byte_readers import ArchiveError
from agentfly.resources.containers.archives.confined_directory import ConfinedDirectory
from agentfly.resources.containers.archives.unpacker import ArchiveTooLarge, Unpacker, UnpackLimits
from tests.support.archives import (
    DIRECTORY,
    HARD_LINK,
    LIMITS,
    SYMLINK,
    What,
    all_of,
    attribute,
    header,
    reader,
    tar,
    unpack,
)

# --- what is outside --------------------------------------------------------------------------------------------------

EVIL: dict[str, list[tuple[str, What]]] = {
    "a name above": [("../../victim/in", b"x")],
    "an absolute name": [("/victim/in", b"x")],
    "a name through a link": [("a", (SYMLINK, "VICTIM")), ("a/in", b"x")],
    "a name through a link upwards": [("a", (SYMLINK, "../victim")), ("a/in", b"x")],
    "a name above through a link": [("d/e/f", b""), ("a", (SYMLINK, "d/e")), ("a/../../../victim/in", b"x")],
    "a file in place of a link": [
        ("a", (SYMLINK, "VICTIM/file")),
        ("./a", b"x"),
        ("b", (HARD_LINK, "VICTIM/file")),
    ],
    "a hard link upwards": [("a", (HARD_LINK, "../victim/file"))],
    "a hard link through a link": [("a", (SYMLINK, "VICTIM")), ("b", (HARD_LINK, "a/file")), ("b", b"x")],
    "a hard link to a link": [("a", (SYMLINK, "VICTIM/file")), ("b", (HARD_LINK, "a")), ("b", b"x")],
    "hidden through a link": [
        ("a", (SYMLINK, "VICTIM")),
        (".wh.a", b""),
        ("a/.wh.file", b""),
        ("a/.wh..wh..opq", b""),
    ],
    "all hidden through a link": [("x", (SYMLINK, "VICTIM")), ("x/.wh..wh..opq", b"")],
    "a link whose directory becomes a link": [
        ("x", (DIRECTORY, "")),
        ("x/link", (SYMLINK, "/anything")),
        ("x/file", (SYMLINK, "/anything")),
        ("x", (SYMLINK, "VICTIM")),
    ],
    "a link whose directory becomes a link upwards": [
        ("x/link", (SYMLINK, "/anything")),
        ("x", (SYMLINK, "../victim")),
    ],
    "a link whose directory's directory becomes a link": [
        ("y/x/link", (SYMLINK, "/anything")),
        ("z", (SYMLINK, "VICTIM/..")),
        ("y", (SYMLINK, "VICTIM/..")),
    ],
    "a directory whose directory becomes a link": [
        ("a", (DIRECTORY, "")),
        ("a/sub", (DIRECTORY, "")),
        ("a", (SYMLINK, "VICTIM")),
    ],
    "a directory that becomes a link": [("a", (DIRECTORY, "")), ("a", (SYMLINK, "VICTIM"))],
    "a directory in place of a link": [("a", (SYMLINK, "VICTIM")), ("a", (DIRECTORY, "")), ("a/sub", (DIRECTORY, ""))],
    "a directory known before it becomes a link": [
        ("a/b/c", b"1"),
        ("a/b", (SYMLINK, "VICTIM")),
        ("a/b/file", b"2"),
        ("a/b/in", b"2"),
    ],
    "a link that becomes a directory and a link again": [
        ("a", (SYMLINK, "VICTIM")),
        ("a", b"x"),
        ("a", (DIRECTORY, "")),
        ("a/in", b"x"),
        ("a", (SYMLINK, "VICTIM")),
        ("a/in", b"x"),
    ],
    "devices and pipes": [("dev", (tarfile.CHRTYPE, "")), ("pipe", (tarfile.FIFOTYPE, ""))],
    "a link to itself": [("a", (SYMLINK, "a")), ("b", b"x")],
}


@pytest.mark.parametrize("kind", EVIL)
@pytest.mark.parametrize("leaving_links", [False, True])
def test_nothing_outside_is_written_changed_or_removed(tmp_path: Path, kind: str, leaving_links: bool) -> None:
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.mkdir()
    target.mkdir()
    (victim / "file").write_text("untouched")
    (victim / "link").symlink_to("/anywhere")
    (victim / "sub").mkdir()
    entries = [
        (name, what if isinstance(what, bytes) else (what[0], what[1].replace("VICTIM", str(victim))))
        for name, what in EVIL[kind]
    ]
    before = all_of(victim)
    unpack(tar(entries, mode=0o1777), target, layer=True, leaving_links=leaving_links)
    assert all_of(victim) == before
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "target"}
    if not leaving_links:
        links = [path for path in target.rglob("*") if path.is_symlink()]
        assert all(Path(os.path.realpath(link)).is_relative_to(target.resolve()) for link in links)


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh...", "d/e/.wh..", "link/.wh..."])
def test_a_layer_that_would_hide_a_directory_above_is_refused_by_name(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    (target / "d" / "e").mkdir(parents=True)
    (target / "link").symlink_to("d/e")
    before = all_of(tmp_path)
    with pytest.raises(ArchiveError, match=f"{name!r}.*hides nothing"):
        unpack(tar({name: b""}), target, layer=True)
    assert all_of(tmp_path) == before


def test_what_only_aufs_needs_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / ".wh.plnk").touch()
    unpack(tar({".wh..wh.plnk": b"", ".wh..wh.orph/x": b""}), tmp_path, layer=True)
    assert (tmp_path / ".wh.plnk").exists()


def test_links_that_stay_inside_are_kept_and_those_that_leave_by_way_of_another_are_not(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    entries: dict[str, What] = {
        "a/b/c/f": b"x",
        "a/b/up": (SYMLINK, "../.."),
        "a/good": (SYMLINK, "b/c/f"),
        "a/root": (SYMLINK, "b/up"),
        "a/b/c/bad": (SYMLINK, "../up/../x"),  # "a/b/x" by its letters alone
        "dangling": (SYMLINK, "a/none"),
        "absolute": (SYMLINK, str(tmp_path / "target" / "a")),
        "circle": (SYMLINK, "circle/x"),
        "long": (SYMLINK, "n" * 300),
    }
    excluded = unpack(tar(entries), tmp_path / "target", leaving_links=False)
    assert sorted(excluded) == ["a/b/c/bad", "absolute", "circle"]
    assert (tmp_path / "target" / "a" / "good").read_bytes() == b"x"
    assert (tmp_path / "target" / "a" / "root").resolve() == tmp_path / "target"


def test_permissions_are_kept_but_for_those_that_make_a_program_somebody_else(tmp_path: Path) -> None:
    unpack(tar([("d", (DIRECTORY, "")), ("d/f", b"")], mode=0o7555), tmp_path)
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o1755  # its owner can always remove it
    assert (tmp_path / "d" / "f").stat().st_mode & 0o7777 == 0o555


def test_files_are_read_as_seen_from_inside(tmp_path: Path) -> None:
    root, host = tmp_path / "root", tmp_path / "host"
    (root / "real").mkdir(parents=True)
    host.mkdir()
    (host / "file").write_text("of the host")
    (root / "real" / "file").write_text("inside")
    (root / "etc").symlink_to("/real")
    (root / "away").symlink_to(host)
    (root / "up").symlink_to("../../../real/file")
    (root / "circle").symlink_to("circle")
    os.mkfifo(root / "real" / "pipe")
    with ConfinedDirectory(root) as inside:
        assert inside.read_file("etc/file", 100) == b"inside"
        assert inside.read_file("/up", 3) == b"ins"
        for name in ("away/file", "circle", "circle/x", "real", "real/pipe", "none", "", "n" * 300, "real/file/x"):
            assert inside.read_file(name, 100) is None
            assert not inside.is_file(name)


# --- how much ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "limit"),
    [
        ([(f"f{n}", b"") for n in range(101)], "max_entries"),
        ([(f"d{n}/e{n}/f", b"") for n in range(34)], "max_entries"),
        ([("d", (DIRECTORY, ""))] * 101, "max_entries"),
        ([("/".join("d" * 65) + "/f", b"")], "max_depth"),
        ([("/".join("d" * 1900), (DIRECTORY, ""))], "max_depth"),
        (
            [("/".join("d" * 33), (DIRECTORY, "")), ("l", (SYMLINK, "d/" * 33)), ("l/" * 2 + "d/" * 33, b"")],
            "max_depth",
        ),
        ([("f", b"x" * 600_000), ("g", b"x" * 600_000)], "max_bytes"),
        ([("f", b"x" * 600_000), ("f", b"x" * 600_000)], "max_bytes"),
    ],
)
def test_more_than_may_be_is_refused_by_the_name_of_the_limit(
    tmp_path: Path, entries: list[tuple[str, What]], limit: str
) -> None:
    with pytest.raises(ArchiveTooLarge) as refused:
        unpack(tar(entries), tmp_path)
    assert refused.value.limit == limit
    assert sum(len(files) + len(folders) for _, folders, files in os.walk(tmp_path)) <= LIMITS.max_entries + 64


def test_just_as_much_as_may_be_is_unpacked(tmp_path: Path) -> None:
    limits = UnpackLimits(max_bytes=300, max_entries=7, max_depth=3)
    entries: list[tuple[str, What]] = [("d", (DIRECTORY, "")), ("d/e/g/f", b"x" * 300), ("d/l", (SYMLINK, "e"))]
    entries += [("d/e", (DIRECTORY, "")), ("d/e/h", (HARD_LINK, "d/e/g/f"))]
    (tmp_path / "whole").mkdir()
    assert unpack(tar(entries), tmp_path / "whole", limits) == []
    assert (tmp_path / "whole" / "d/e/h").read_bytes() == b"x" * 300
    for less in ({"max_bytes": 299}, {"max_entries": 6}, {"max_depth": 2}):
        (limit,) = less
        (tmp_path / limit).mkdir()
        with pytest.raises(ArchiveTooLarge):
            unpack(tar(entries), tmp_path / limit, replace(limits, **less))


def test_a_sparse_file_counts_with_what_it_leaves_out_and_is_not_written_out(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**12)
    packed = subprocess.run(["tar", "-C", tmp_path, "-cSf", "-", "sparse"], check=True, capture_output=True).stdout
    (tmp_path / "sparse").unlink()
    with pytest.raises(ArchiveTooLarge, match="more than 1000000 bytes"):
        unpack(packed, tmp_path)
    unpack(packed, tmp_path, replace(LIMITS, max_bytes=10**12))
    about = (tmp_path / "sparse").stat()
    assert about.st_size == 10**12
    assert about.st_blocks < 100


def test_links_that_lead_through_links_again_and_again_are_bounded_together(tmp_path: Path) -> None:
    entries: list[tuple[str, What]] = [("d/e", b"")]
    entries += [("l0", (SYMLINK, "d/../" * 400 + "d"))]
    entries += [(f"l{n}", (SYMLINK, f"l{n - 1}/../" * 30 + "d")) for n in range(1, 30)]
    with pytest.raises((ArchiveTooLarge, ArchiveError), match="links"):
        unpack(tar([*entries, *((f"l{n % 30}/{n}", b"") for n in range(70))]), tmp_path, leaving_links=False)


def test_a_directory_is_cleared_for_a_layer_once_however_often_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda place: (listed.append(place), listdir(place))[1])  # type: ignore[func-returns-value]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "below").touch()
    unpack(tar([("d/kept", b""), *[("d/.wh..wh..opq", b"")] * 50]), tmp_path, layer=True)
    assert listdir(tmp_path / "d") == ["kept"]
    assert len(listed) == 1


@pytest.mark.parametrize(
    "entries",
    [
        [("a", b""), ("a/b", b"")],
        [("n" * 300, b"")],
        [("n" * 300 + "/f", b"")],
        [("a", (SYMLINK, "b")), ("b", (SYMLINK, "a")), ("a/c", b"")],
        [("a", (SYMLINK, "f/b")), ("f", b""), ("a/c", b"")],
    ],
    ids=["a file as a directory", "a long name", "a long directory", "a circle", "a link through a file"],
)
def test_names_that_cannot_be_are_the_fault_of_the_archive(tmp_path: Path, entries: list[tuple[str, What]]) -> None:
    with pytest.raises(ArchiveError):
        unpack(tar(entries), tmp_path)


def test_paths_that_the_system_could_not_name_are_not_made(tmp_path: Path) -> None:
    half = "/".join(["n" * 200] * 12)
    entries: list[tuple[str, What]] = [(half, (DIRECTORY, "")), ("l", (SYMLINK, half)), (f"l/{half}/f", b"")]
    with pytest.raises(ArchiveError, match="too long for the system"):
        unpack(tar(entries), tmp_path)


def test_of_names_a_bounded_number_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "_MOST_NAMES", 2)
    entries: list[tuple[str, What]] = [(f"pipe{n}", (tarfile.FIFOTYPE, "")) for n in range(5)]
    entries += [(f"d{n % 4}/f{n}", b"") for n in range(12)]
    with Unpacker(tmp_path, LIMITS) as unpacker:
        unpacker.add(reader(tar(entries)))
        assert unpacker.skipped == ["pipe0", "pipe1"]
        assert len(unpacker._places) <= 2
    assert len([*tmp_path.glob("d*/f*")]) == 12


def test_a_link_to_nothing_at_all_is_left_out(tmp_path: Path) -> None:
    assert unpack(tar({"l": (SYMLINK, ""), "f": b""}), tmp_path) == ["l"]  # type: ignore[arg-type]
    assert (tmp_path / "f").exists()


# --- for how long -----------------------------------------------------------------------------------------------------


async def test_unpacking_ends_with_the_call_that_asked_for_it(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(token: CancelToken) -> None:
        try:
            with Unpacker(tmp_path, replace(LIMITS, max_entries=10**9), token) as unpacker:
                while True:
                    unpacker.add(reader(tar({"f": b"x"})))
                    begun.set()
        finally:
            ended.set()

    task = asyncio.create_task(run_in_cancellable_thread(work, None))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_token_stops_an_archive_between_its_pieces_and_links(tmp_path: Path) -> None:
    token = CancelToken()
    with Unpacker(tmp_path, LIMITS, token, leaving_links=False) as unpacker:
        unpacker.add(reader(tar({"l": (SYMLINK, "a/b/c")})))
        token.cancelled.set()
        with pytest.raises(WorkCancelled):
            unpacker.add(reader(tar({"f": b"x"})))
        with pytest.raises(WorkCancelled):
            unpacker.remove_escaping_links()
    with (
        Unpacker(tmp_path, LIMITS, CancelToken(1e-9)) as late,
        pytest.raises(TimeoutError, match="longer than 1e-09 s"),
    ):
        late.add(reader(tar({"f": b"x"})))


def test_a_time_that_no_file_can_have_is_not_kept(tmp_path: Path) -> None:
    file = header(b"f", tarfile.REGTYPE, content=b"x")
    times = [attribute("mtime", value) + file for value in ("inf", "nan", "1e300", "-1", "1.5")]
    unpack(b"".join(times) + header(b"g", tarfile.REGTYPE, mtime=2**80) + b"\0" * 1024, tmp_path)
    assert (tmp_path / "f").stat().st_mtime == 1.5
    assert (tmp_path / "g").exists()

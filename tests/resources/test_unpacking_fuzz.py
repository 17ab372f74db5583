"""Unpacking of random archives: nothing outside is touched, and only errors about bad archives are raised."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.core.errors import ResourceStartError
from agentfly.core.threads.run import CancelToken
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers import image_store
from agentfly.resources.containers.archives.byte_readers import (
    ArchiveError,
    FileSlice,
    MalformedArchive,
    open_decompressed,
)
from agentfly.resources.containers.archives.tar_reader import TarReader
from agentfly.resources.containers.archives.unpacker import Unpacker, UnpackLimits
from agentfly.resources.containers.spec import ContainerSpec
from tests.resources.test_containers_images import BASE, OVER, layout, saved
from tests.resources.test_tar_reader import BROKEN_OFF, GARBLED
from tests.resources.test_unpacking import EVIL
from tests.support.archives import What, all_of, reader, summed, tar
from tests.support.scale import scaled

LIMITS = UnpackLimits(max_bytes=10_000, max_entries=40, max_depth=6)
Layer = list[tuple[str, What]]

_PARTS = st.sampled_from(
    ["a", "b", "link", "sub", "file", "..", ".", "", ".wh.a", ".wh.sub", ".wh..wh..opq", ".wh...", ".wh..", "n" * 256]
)
_NAMES = st.lists(_PARTS, min_size=1, max_size=5).map("/".join)
_TARGETS = st.one_of(_NAMES, st.sampled_from(["VICTIM", "VICTIM/sub", "../victim", "../../victim/file", "/", ".."]))
_KINDS = st.sampled_from([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"Z"])
_ENTRIES = st.tuples(_NAMES, st.one_of(st.binary(max_size=3), st.tuples(_KINDS, _TARGETS)))
_LAYERS = st.lists(st.lists(_ENTRIES, max_size=10), min_size=1, max_size=3)


@contextmanager
def _places() -> Iterator[tuple[Path, Path]]:
    """A directory to unpack into, and one beside it."""
    with tempfile.TemporaryDirectory() as directory:
        target, victim = Path(directory) / "target", Path(directory) / "victim"
        target.mkdir()
        (victim / "sub").mkdir(parents=True)
        (victim / "file").write_text("untouched")
        (victim / "link").symlink_to("/anywhere")
        (victim / "a").symlink_to("nowhere")
        yield target, victim


def _aimed(layer: Layer, victim: Path) -> Layer:
    return [
        (name, what if isinstance(what, bytes) else (what[0], what[1].replace("VICTIM", str(victim))))
        for name, what in layer
    ]


def _found(test: Callable[..., None]) -> Callable[..., None]:
    """Tries what was found before."""
    for entries in EVIL.values():
        test = example(layers=[entries], mode=0o1777, layered=True, leaving_links=False)(test)
    return test


@settings(max_examples=scaled(25, 10_000))
@_found
@given(layers=_LAYERS, mode=st.sampled_from([0, 0o1777, 0o7777]), layered=st.booleans(), leaving_links=st.booleans())
def test_whatever_an_archive_names_and_links_nothing_outside_is_touched(
    layers: list[Layer], mode: int, layered: bool, leaving_links: bool
) -> None:
    with _places() as (target, victim):
        before = all_of(victim)
        try:
            with Unpacker(target, LIMITS, leaving_links=leaving_links) as unpacker:
                for layer in layers:
                    unpacker.add(reader(tar(_aimed(layer, victim), mode)), layer=layered)
                unpacker.remove_escaping_links()
        except ArchiveError:
            pass
        else:
            links = [] if leaving_links else [path for path in target.rglob("*") if path.is_symlink()]
            assert all(Path(os.path.realpath(link)).is_relative_to(target.resolve()) for link in links)
        inside = [*target.rglob("*")]
        assert len(inside) <= LIMITS.max_entries + LIMITS.max_depth
        assert all(len(path.relative_to(target).parts) <= LIMITS.max_depth + 1 for path in inside)
        assert all(not path.lstat().st_mode & 0o6000 for path in inside)
        remove_tree(target)
        assert all_of(victim) == before
        assert {path.name for path in victim.parent.iterdir()} == {"victim"}


_HONEST = tar([*BASE.items(), *OVER.items()])
_FIELDS = st.sampled_from([0, 1, 99, 100, 124, 135, 136, 156, 157, 257, 263, 345, 386, 398, 482, 483, 500])
_CHANGES = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(_FIELDS, st.integers(0, 511)), st.binary(min_size=1, max_size=12)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=scaled(25, 20_000))
@given(changes=_CHANGES, sums=st.booleans(), size=st.none() | st.integers(0, len(_HONEST)))
def test_whatever_is_changed_in_an_archive_it_is_read_or_refused(
    changes: list[tuple[int, int, bytes]], sums: bool, size: int | None
) -> None:
    content = bytearray(_HONEST)
    for block, place, text in changes:
        start = 512 * (block % (len(content) // 512))
        changed = bytearray(content[start : start + 512])
        changed[place : place + len(text)] = text
        content[start : start + 512] = summed(changed[:512]) if sums else changed[:512]
    with _places() as (target, victim):
        before = all_of(victim)
        with suppress(ArchiveError), Unpacker(target, LIMITS, leaving_links=False) as unpacker:
            unpacker.add(reader(bytes(content[:size])))
            unpacker.remove_escaping_links()
        remove_tree(target)
        assert all_of(victim) == before


def _garbled(test: Callable[..., None]) -> Callable[..., None]:
    for content in (*GARBLED.values(), *BROKEN_OFF.values()):
        test = example(content=content)(test)
    return test


@settings(max_examples=scaled(30, 20_000))
@_garbled
@given(content=st.binary(max_size=2000).map(lambda text: text + b"\0" * (-len(text) % 512)))
def test_whatever_bytes_there_are_they_are_read_or_refused(content: bytes) -> None:
    with suppress(MalformedArchive):
        deque(iter(reader(content).next, None), maxlen=0)


_PACKED = [pack(_HONEST) for pack in (gzip.compress, bz2.compress, lzma.compress)]


@settings(max_examples=scaled(30, 20_000))
@given(
    packed=st.sampled_from(_PACKED),
    place=st.integers(0, 4000),
    text=st.binary(max_size=4),
    cut=st.none() | st.integers(0, 4000),
)
def test_whatever_is_changed_in_what_is_compressed_it_is_read_or_refused(
    packed: bytes, place: int, text: bytes, cut: int | None
) -> None:
    changed = bytearray(packed[: cut and cut % len(packed)])
    start = place % max(1, len(changed))
    changed[start : start + len(text)] = text
    token = CancelToken()
    with suppress(MalformedArchive):
        archive = TarReader(open_decompressed(FileSlice(io.BytesIO(bytes(changed)), token), token), max_length=10**6)
        deque(iter(archive.next, None), maxlen=0)


# --- images -----------------------------------------------------------------------------------------------------------

_DIGESTS = ("sha256:" + "0" * 64, "sha256:../../index.json", "")
_KEYS = ("Layers", "layers", "manifests", "digest", "platform", "architecture")
_WORDS = st.sampled_from([*_KEYS, *_DIGESTS, "amd64", "0/layer.tar", "../secret", "/etc/passwd", "index.json"])
_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=8,
)
_IMAGES = {**saved(tar(BASE), tar(OVER)), **layout(tar(BASE), tar(OVER))}
_DOCUMENTS = [name for name, content in _IMAGES.items() if isinstance(content, bytes) and content[:1] in b"[{"]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@settings(max_examples=scaled(20, 4_000))
@given(
    names=st.lists(st.sampled_from(_DOCUMENTS), min_size=1, max_size=2),
    value=st.one_of(_VALUES.map(lambda value: json.dumps(value).encode()), st.binary(max_size=20)),
    without=st.sampled_from(["manifest.json", "index.json", "oci-layout", "0/layer.tar"]),
    as_layout=st.booleans(),
)
def test_whatever_the_documents_of_an_image_say_it_is_unpacked_or_refused(
    names: list[str], value: bytes, without: str, as_layout: bool
) -> None:
    files = {name: content for name, content in _IMAGES.items() if name != without}
    files |= {name: value for name in names if name != without}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "image"
        if as_layout:
            for name, content in files.items():
                assert isinstance(content, bytes)
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(content)
        else:
            path.write_bytes(tar(files))
        with suppress(ResourceStartError):
            image_store.unpack_rootfs(CancelToken(), ContainerSpec(image=str(path)))
        left = (
            [found.name for found in image_store.image_store_directory().glob(".*")]
            if image_store.image_store_directory().is_dir()
            else []
        )
        assert left == []

"""Images as archives: unpacked once, completely or not at all, and never outside their directory."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.core.errors import ResourceStartError
from agentfly.resources.containers import image_store
from agentfly.resources.containers.archives.unpacker import Unpacker
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.resources.containers.image_store import rootfs_path
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.engine.engine import ResourceEngine
from tests.support.archives import What, all_of, tar

BASE: dict[str, What] = {
    "bin": (tarfile.SYMTYPE, "usr/bin"),
    "usr/bin/bash": b"#!shell",
    "etc/old": b"old",
    "etc/kept": b"kept",
    "opt/a/one": b"1",
    "opt/a/two": b"2",
    "etc/alternatives/sh": (tarfile.SYMTYPE, "/usr/bin/bash"),
}
OVER: dict[str, What] = {
    "bin/more": b"more",  # through the link of the layer below
    "etc/.wh.old": b"",
    "opt/a/three": b"3",
    "opt/a/.wh..wh..opq": b"",
    "usr/bin/again": (tarfile.LNKTYPE, "usr/bin/bash"),
}


def blob(content: bytes) -> tuple[str, str]:
    digest = hashlib.sha256(content).hexdigest()
    return f"blobs/sha256/{digest}", f"sha256:{digest}"


def layout(*layers: bytes) -> dict[str, What]:
    """An OCI image layout, whose index names another."""
    files: dict[str, What] = {"oci-layout": b"{}"}

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


def saved(*layers: bytes) -> dict[str, What]:
    """What ``docker save`` writes."""
    files: dict[str, What] = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    files["manifest.json"] = json.dumps([{"Config": "c.json", "Layers": list(files)}]).encode()
    return files


def prepare(image: str, **fields: Any) -> None:
    asyncio.run(image_store.prepare_rootfs(ContainerSpec(image=image, **fields)))


def directories(cache: Path) -> list[Path]:
    """What has been unpacked, or is being unpacked."""
    return [path for path in cache.iterdir() if path.is_dir() and not path.is_symlink()]


def write_layout(path: Path, entries: dict[str, What]) -> Path:
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
    root = rootfs_path(image)
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
    assert (rootfs_path(image) / "etc" / "old").read_bytes() == b"old"


def test_the_same_content_is_unpacked_once_and_a_changed_archive_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = []
    add = Unpacker.add
    monkeypatch.setattr(Unpacker, "add", lambda *args, **more: (unpacked.append(1), add(*args, **more))[1])  # type: ignore[func-returns-value]
    first, second = write(tmp_path / "a.tar", tar(BASE)), write(tmp_path / "b.tar", tar(BASE))
    for image in (first, second, first, second):
        prepare(str(image))
    assert rootfs_path(str(first)) == rootfs_path(str(second))
    assert len(unpacked) == 1
    write(first, tar({**BASE, "etc/new": b"new"}))
    prepare(str(first))
    assert (rootfs_path(str(first)) / "etc" / "new").exists()
    assert not (rootfs_path(str(second)) / "etc" / "new").exists()


def test_processes_that_want_the_same_image_wait_for_one_of_them(tmp_path: Path, cache: Path) -> None:
    image = write(tmp_path / "a.tar", tar({**BASE, **{f"many/{n}": b"x" for n in range(300)}}))
    program = "import asyncio, sys; from agentfly.resources.containers.image_store import *; "
    program += "asyncio.run(prepare_rootfs(ContainerSpec(image=sys.argv[1]))); print(rootfs_path(sys.argv[1]))"
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
    whole = rootfs_path(str(image))
    for link in [path for path in cache.iterdir() if path.is_symlink()]:
        link.unlink()
    whole.rename(cache / f".{whole.name}")
    (cache / f".{whole.name}" / "half").touch()
    with pytest.raises(ResourceStartError, match="no directory with an unpacked root file system"):
        rootfs_path(str(image))
    prepare(str(image))
    assert not (rootfs_path(str(image)) / "half").exists()


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
    assert directories(cache) == []


def test_a_directory_needs_no_preparation_and_must_have_a_shell(tmp_path: Path) -> None:
    prepare(str(tmp_path))
    with pytest.raises(ResourceStartError, match="has /bin/bash"):
        rootfs_path(str(tmp_path))
    with pytest.raises(ResourceStartError, match="has /bin/bash"):
        rootfs_path("/no/such/image")


# --- images that nobody vouches for ----------------------------------------------------------------------------------

INDEX_OF_ITSELF = b'{"manifests": [{"digest": "sha256:../../index.json"}]}'
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a directory above that a layer hides": lambda: tar(saved(tar(BASE), tar({".wh...": b""}))),
    "another, further down": lambda: tar(saved(tar(BASE), tar({"etc/.wh...": b""}))),
    "the image that a layer hides": lambda: tar(layout(tar(BASE), tar({".wh..": b""}))),
    "documents that are deep": lambda: tar({"manifest.json": b"[" * 100_000}),
    "documents that are no lists": lambda: tar({"manifest.json": b"{}"}),
    "layers that are no names": lambda: tar({"manifest.json": b'[{"Layers": [1, null]}]'}),
    "an index that is a list": lambda: tar({"oci-layout": b"{}", "index.json": b"[]"}),
    "an index of itself": lambda: tar(
        {"oci-layout": b"{}", "index.json": b'{"manifests": [{"digest": "sha256:../../index.json"}]}'}
    ),
    "very many layers": lambda: tar({"manifest.json": json.dumps([{"Layers": ["l"] * 2000}]).encode(), "l": tar(BASE)}),
    "a document of many megabytes": lambda: tar({"manifest.json": b" " * 2**23}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_image_is_refused_and_touches_nothing_else_in_the_store(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    prepare(str(write(tmp_path / "good.tar", tar(BASE))))
    others = {path.name: all_of(path) for path in cache.iterdir() if path.suffix != ".lock"}
    with pytest.raises(ResourceStartError, match="could not be unpacked"):
        prepare(str(write(tmp_path / "evil.tar", HOSTILE[kind]())))
    assert {path.name: all_of(path) for path in cache.iterdir() if path.suffix != ".lock"} == others


def test_directories_of_the_host_keep_their_permissions_whatever_becomes_a_link(tmp_path: Path) -> None:
    (tmp_path / "host" / "sub").mkdir(parents=True)
    before = all_of(tmp_path / "host")
    entries: list[tuple[str, What]] = [*BASE.items(), ("a", (tarfile.DIRTYPE, "")), ("a/sub", (tarfile.DIRTYPE, ""))]
    entries.append(("a", (tarfile.SYMTYPE, str(tmp_path / "host"))))
    prepare(str(write(tmp_path / "evil.tar", tar(entries, mode=0o1777))))
    assert all_of(tmp_path / "host") == before


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"max_image_files": 3}, "max_image_files"), ({"max_image_size": 5}, "max_image_size")],
)
def test_an_image_of_more_than_may_be_is_refused_by_the_name_of_the_setting(
    tmp_path: Path, cache: Path, fields: dict[str, int], setting: str
) -> None:
    image = write(tmp_path / "large.tar", tar(saved(*LAYERS)))
    with pytest.raises(ResourceStartError, match=rf"ContainerSpec\({setting}=…\) allows more"):
        prepare(str(image), **fields)
    assert directories(cache) == []
    prepare(str(image))


def test_a_layout_cannot_pass_for_another_whose_index_it_has(tmp_path: Path) -> None:
    good, evil = layout(tar(BASE)), layout(tar(BASE))
    name, _ = blob(tar(BASE))
    evil[name] = tar({**BASE, "etc/old": b"evil"})
    with pytest.raises(ResourceStartError, match="has another digest"):
        prepare(str(write_layout(tmp_path / "evil", evil)))
    image = str(write_layout(tmp_path / "good", good))
    prepare(image)
    assert (rootfs_path(image) / "etc" / "old").read_bytes() == b"old"


def test_files_of_the_host_are_no_layers_of_a_layout(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.tar", tar(BASE))
    name, _ = blob(secret.read_bytes())
    for number, files in enumerate((layout(b"x"), layout(tar(BASE)))):
        place = write_layout(tmp_path / f"layout{number}", files)
        if number == 0:
            (place / "manifest.json").write_text(json.dumps([{"Layers": ["../secret.tar"]}]))
        else:
            (place / name).unlink()
            (place / name).symlink_to(secret)
        with pytest.raises(ResourceStartError):
            prepare(str(place))


def test_a_layout_whose_index_is_changed_is_unpacked_anew(tmp_path: Path) -> None:
    place = write_layout(tmp_path / "layout", layout(tar(BASE)))
    prepare(str(place))
    write_layout(place, layout(tar({**BASE, "etc/new": b"new"})))
    prepare(str(place))
    assert (rootfs_path(str(place)) / "etc" / "new").exists()


async def test_a_pipe_in_a_layout_holds_up_nobody(tmp_path: Path) -> None:
    place = write_layout(tmp_path / "layout", layout(tar(BASE)))
    name, _ = blob(tar(BASE))
    (place / name).unlink()
    os.mkfifo(place / name)
    with pytest.raises(ResourceStartError, match="is no file"):
        await asyncio.wait_for(image_store.prepare_rootfs(ContainerSpec(image=str(place))), 10)


def test_a_shell_of_the_host_is_none_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "bin").symlink_to("/bin")
    with pytest.raises(ResourceStartError, match="has /bin/bash"):
        rootfs_path(str(tmp_path))
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "bash").touch()
    (tmp_path / "bin").unlink()
    (tmp_path / "bin").symlink_to("/usr/bin")
    assert rootfs_path(str(tmp_path)) == tmp_path.resolve()


async def test_unpacking_an_image_ends_with_the_call_that_asked_for_it(tmp_path: Path, cache: Path) -> None:
    image = write(tmp_path / "a.tar", tar({**BASE, **{f"many/{n}": b"x" for n in range(2000)}}))
    preparing = asyncio.create_task(image_store.prepare_rootfs(ContainerSpec(image=str(image))))
    while not begun(cache):  # noqa: ASYNC110  (a file appears)
        await asyncio.sleep(0)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert directories(cache) == []


def begun(cache: Path) -> bool:
    return any(cache.glob(".sha256-*/many/*"))


async def test_waiting_for_another_process_that_unpacks_ends_with_the_call(tmp_path: Path, cache: Path) -> None:
    spec = ContainerSpec(image=str(write(tmp_path / "a.tar", tar(BASE))))
    await image_store.prepare_rootfs(spec)
    lock = forget(cache)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        preparing = asyncio.create_task(image_store.prepare_rootfs(spec))
        await asyncio.sleep(0.1)
        assert not preparing.done()
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing


def forget(cache: Path) -> Path:
    """Forget where the only image was unpacked; the file that its next unpacking has to lock."""
    (link,) = (path for path in cache.iterdir() if path.is_symlink())
    link.unlink()
    return cache / f"{link.name}.lock"


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
    assert not (image_store.rootfs_path(str(debian)) / "usr" / "bin" / "new").exists()


def test_what_was_half_unpacked_into_a_directory_that_is_gone_counts_as_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    traces = {"paths": [str(store / "data" / "draft"), str(store / "a.sqsh")], "lock": str(store / "a.lock")}
    image_store.remove_staging(traces)
    assert not store.exists()
    store.touch()  # or is no directory any more
    image_store.remove_staging(traces)
    store.unlink()
    (store / "data" / "draft" / "deep").mkdir(parents=True)
    image_store.remove_staging(traces)
    assert not (store / "data" / "draft").exists()

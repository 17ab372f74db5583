"""EnrootImage: images of enroot, imported, packed and unpacked once for all sandboxes and processes of this user."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentfly.core.errors import ResourceStartError
from agentfly.core.files import async_file_lock
from agentfly.core.numbers import parse_byte_size
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.threads.run import CancelToken, run_in_cancellable_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.containers import image_store
from agentfly.resources.containers.archives.byte_readers import CHUNK_SIZE, FileSlice
from agentfly.resources.containers.archives.confined_directory import ConfinedDirectory
from agentfly.resources.containers.enroot.program import enroot_environment, import_environment, run_program
from agentfly.resources.containers.runtime_directory import sandbox_uid
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.ledger import CleanupRecord

_MAGIC = b"hsqs"
_LONGEST_ENVIRONMENT = 2**16  # bytes
_LONGEST_LINE = 2**14
_FILE = re.compile(rb"-\S{9}\s+\d+/\d+\s+(\d{1,19}) ")
_QUICKLY = ("-noI", "-noD", "-noF", "-noX")  # what is packed to be unpacked at once is not compressed


@dataclass(frozen=True)
class EnrootImage:
    """An image that sandboxes can be laid over.

    Args:
        root: the directory with its root file system, made by ``enroot create`` and never written to again.
        variables: the environment that it asks for.
    """

    root: Path
    variables: tuple[tuple[str, str], ...]


def store_directory() -> Path:
    """Return the directory of images."""
    return image_store.image_store_directory() / "enroot"


def prepared_image(store: Path, spec: ContainerSpec) -> EnrootImage | None:
    """A spec's image, if it has been prepared as it is now.

    Raises:
        ResourceStartError: the image cannot be looked at.
    """
    with _explained(store, spec):
        root = store / "data" / _fingerprint(spec)
        return EnrootImage(root, _variables(root)) if root.is_dir() else None


async def prepare(program: str, store: Path, spec: ContainerSpec) -> None:
    """Fetch, pack and unpack a spec's image, unless that is done. Wait for another process that is doing it.

    Args:
        program: the path of enroot.
        store: the directory of images.
        spec: the spec with the image.

    Raises:
        ResourceStartError: the image is missing or invalid, has no bash, or there is no room for it.
    """
    with _explained(store, spec):
        await _prepare(program, store, spec)


async def _prepare(program: str, store: Path, spec: ContainerSpec) -> None:
    data = store / "data"
    root = data / _fingerprint(spec)
    if root.is_dir():
        return
    data.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(data, sandbox_uid(), sandbox_uid())
    async with async_file_lock(store / f"{root.name}.lock"):
        if not root.is_dir():
            draft = root.with_name(f"draft-{root.name}")
            packed, place = store / f"{root.name}.sqsh", store / f"{root.name}.run"
            traces = {"paths": [str(draft), str(packed), str(place)], "lock": str(store / f"{root.name}.lock")}
            record = CleanupRecord("image-draft", image_store.REMOVE_STAGING, traces)
            try:
                await run_in_thread(_remove, draft, packed, place)  # of a process that was killed at it
                place.mkdir()
                os.chown(place, sandbox_uid(), -1)
                source = await _build_squashfs(program, spec, packed)
                if source == packed:
                    await run_in_thread(packed.chmod, 0o644)
                given = enroot_environment(place, data)
                await _check_size(spec, source)
                await run_program([program, "create", "--name", draft.name, str(source)], given)
                if not image_store.has_bash(draft):
                    raise ResourceStartError(
                        f"ContainerSpec(image={spec.image!r}) has no /bin/bash, which the shell of a sandbox is. "
                        "Install bash in the image."
                    )
                draft.rename(root)
            finally:
                await run_in_thread(_remove, draft, packed, place)
                record.close()


async def _build_squashfs(program: str, spec: ContainerSpec, packed: Path) -> Path:
    """The image as a squashfs file that enroot can read: its own, or one that is made."""
    if spec.image_kind == "name":
        await run_program(
            [program, "import", "--output", str(packed), _enroot_uri(spec.image)], import_environment(), as_user=False
        )
        return packed
    path = Path(spec.image)
    if _is_packed(path):
        if os.geteuid() != 0:
            return path
        await run_in_cancellable_thread(_copy, None, path, packed)  # the user of sandboxes may not read it where it is
        return packed
    await image_store.prepare_rootfs(spec)
    source = image_store.rootfs_path(spec.image)
    if shutil.which("mksquashfs") is None:
        raise ResourceStartError(
            f"ContainerSpec(image={spec.image!r}) must be packed for enroot, and mksquashfs is missing: install "
            "squashfs-tools, or name a squashfs file, as 'enroot import' writes it."
        )
    words = [
        "mksquashfs",
        str(source),
        str(packed),
        "-all-root",
        "-no-progress",
        *_QUICKLY,
        "-wildcards",
        "-e",
        "dev/*",
    ]
    await run_program(words, import_environment(), as_user=False)
    return packed


async def _check_size(spec: ContainerSpec, packed: Path) -> None:
    """See that an image holds no more than its spec says, before it is unpacked.

    Raises:
        ResourceStartError: it does.
    """
    listing = _SizeCheck(spec)
    # the user of sandboxes may not read it where it is, and what is listed is not unpacked
    await run_program(["unsquashfs", "-lln", "-no-progress", str(packed)], import_environment(), take=listing.take)


class _SizeCheck:
    """Adds up the sizes in unsquashfs's listing, which has one line per entry with its type, owner and size."""

    def __init__(self, spec: ContainerSpec) -> None:
        self._spec = spec
        self._rest = b""
        self._entries = self._bytes = 0

    def take(self, printed: bytes) -> None:
        *lines, self._rest = (self._rest + printed).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for line in lines:
            self._entries += 1
            if (entry := _FILE.match(line)) is not None:
                self._bytes += int(entry[1])
        if self._entries > self._spec.max_image_files:
            raise self._refusal(f"{self._spec.max_image_files} files and directories", "max_image_files")
        if self._bytes > (most := parse_byte_size(self._spec.max_image_size)):
            raise self._refusal(f"{most} bytes", "max_image_size")

    def _refusal(self, what: str, setting: str) -> ResourceStartError:
        return ResourceStartError(
            f"ContainerSpec(image={self._spec.image!r}) was not unpacked: it holds more than {what}. "
            f"ContainerSpec({setting}=…) allows more."
        )


@contextmanager
def _explained(store: Path, spec: ContainerSpec) -> Iterator[None]:
    """Say of what the host refuses which image it was for, and what to do."""
    try:
        yield
    except OSError as error:
        raise ResourceStartError(
            f"ContainerSpec(image={spec.image!r}) could not be prepared in {store}: {error}. Make the image, and the "
            "directories above it, readable to the user who starts the boxes. For another place, set "
            "AGENTFLY_CACHE_DIR."
        ) from error


def _enroot_uri(name: str) -> str:
    """An image's name as enroot writes it: the registry, where one is named, is set apart by a ``#``."""
    registry, slash, rest = name.partition("/")
    if slash and ("." in registry or ":" in registry or registry == "localhost"):
        return f"docker://{registry}#{rest}"
    return f"docker://{name}"


def _fingerprint(spec: ContainerSpec) -> str:
    """A name for an image as it is now. A directory counts as changed when something right below it is."""
    known: object = spec.image
    if spec.image_kind == "path":
        path = Path(spec.image)
        if not path.exists():
            raise ResourceStartError(f"ContainerSpec(image={spec.image!r}) is not there on this host.")
        entries = sorted(path.iterdir()) if path.is_dir() else []
        about = [(str(each), each.lstat()) for each in (path.resolve(), *entries)]
        known = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in about]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _is_packed(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _variables(root: Path) -> tuple[tuple[str, str], ...]:
    """Return the environment variables of an image. References to variables of the host are dropped."""
    with ConfinedDirectory(root) as inside:
        text = inside.read_file("etc/environment", _LONGEST_ENVIRONMENT) or b""
    found = []
    for line in text.decode(errors="replace").splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and name.isidentifier() and name.isascii() and "${" not in value:
            found.append((name, value.strip("\"'")))
    return tuple(found)


def _copy(token: CancelToken, source: Path, target: Path) -> None:
    with source.open("rb") as file, target.open("xb") as copy:
        content = FileSlice(file, token)
        while piece := content.read(CHUNK_SIZE):
            copy.write(piece)


def _remove(*paths: Path) -> None:
    for path in paths:
        remove_tree(path)

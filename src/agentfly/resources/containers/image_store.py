"""The image store: root file systems by path on the host, as directories or as archives that are unpacked once.

An archive may be a tar of the root file system, what ``docker save`` writes, or an OCI image layout as a tar or as a
directory. Its layers may be compressed. The unpacked files are kept in the cache directory, by the archive's content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfly.core.errors import ResourceStartError
from agentfly.core.files import file_lock, try_lock
from agentfly.core.numbers import parse_byte_size
from agentfly.core.threads.run import CancelToken, run_in_cancellable_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.core.user_directories import cache_root
from agentfly.resources.containers.archives.byte_readers import CHUNK_SIZE, ArchiveError, FileSlice
from agentfly.resources.containers.archives.confined_directory import ConfinedDirectory
from agentfly.resources.containers.archives.image_archives import INDEX, is_layout, open_image
from agentfly.resources.containers.archives.tar_reader import TarReader
from agentfly.resources.containers.archives.unpacker import ArchiveTooLarge, Unpacker, UnpackLimits
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.process.ledger import CleanupRecord

MAX_DEPTH = 256
"""Directories of an image that may lie one in the other."""
SHELLS = ("bin/bash", "usr/bin/bash")
_SETTINGS = {"max_bytes": "max_image_size", "max_entries": "max_image_files"}
REMOVE_STAGING = f"{__name__}:remove_staging"
"""The address of the function that removes images half made, by ``{"paths": […], "lock": path}``."""


def rootfs_path(image: str) -> Path:
    """The directory with the root file system of a prepared image.

    Raises:
        ResourceStartError: there is none.
    """
    path = Path(image)
    if _is_archive(path):
        try:
            path = _unpacked_path(path)
        except OSError as error:
            raise _unreadable(path, error) from error
    if not has_bash(path):
        raise ResourceStartError(
            f"ContainerSpec(image={image!r}): no directory with an unpacked root file system that has /bin/bash is "
            "there on this host, nor an archive of one."
        )
    return path.resolve()


def _is_archive(path: Path) -> bool:
    try:
        return path.is_file() or is_layout(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ResourceStartError:
    return ResourceStartError(
        f"ContainerSpec(image={str(path)!r}) cannot be looked at: {error.strerror}. Make it, and the directories "
        "above it, readable to the user who starts the boxes."
    )


def has_bash(root: Path) -> bool:
    """Whether a root file system has bash, as seen from inside."""
    try:
        with ConfinedDirectory(root) as inside:
            return any(map(inside.is_file, SHELLS))
    except OSError:
        return False


async def prepare_rootfs(spec: ContainerSpec) -> None:
    """Unpack a spec's image, if it is an archive that was not unpacked before, on a thread that ends with the call.

    Raises:
        ResourceStartError: it is no archive of a root file system, exceeds the limits, or there is no room for it.
    """
    await run_in_cancellable_thread(unpack_rootfs, None, spec)


def unpack_rootfs(token: CancelToken, spec: ContainerSpec) -> None:
    """Do what `prepare_rootfs` does, on the calling thread, until the token cancels it."""
    image, limits = spec.image, UnpackLimits(parse_byte_size(spec.max_image_size), spec.max_image_files, MAX_DEPTH)
    path = Path(image)
    if not _is_archive(path):
        return
    try:
        if _unpacked_path(path).is_dir():
            return
        with file_lock(image_store_directory() / f"{_fingerprint(path)}.lock", check=token.check):
            if not _unpacked_path(path).is_dir():
                _unpack(path, limits, token)
    except ArchiveTooLarge as error:
        setting = _SETTINGS.get(error.limit)
        cure = f"ContainerSpec({setting}=…) allows more." if setting else "No image needs that."
        raise ResourceStartError(f"ContainerSpec(image={image!r}) was not unpacked: {error}. {cure}") from error
    except (OSError, ArchiveError) as error:
        raise ResourceStartError(
            f"ContainerSpec(image={image!r}) could not be unpacked into {image_store_directory()}: {error}. "
            "Give a tar of a root file system, what 'docker save' writes, or an OCI layout. For another place, set "
            "AGENTFLY_CACHE_DIR."
        ) from error


def image_store_directory() -> Path:
    """The directory of unpacked images. Root's is readable by the ordinary users that its sandboxes run as."""
    if os.geteuid() == 0 and not os.environ.get("AGENTFLY_CACHE_DIR"):
        return Path("/var/cache/agentfly/images")
    return cache_root() / "images"


def _fingerprint(path: Path) -> str:
    """A name for an archive's current state, from attributes that change whenever its content does."""
    about = (path / INDEX if path.is_dir() else path).stat()
    known = (str(path.resolve()), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _unpacked_path(path: Path) -> Path:
    """Return the path of an unpacked archive: a link named by its fingerprint, created once unpacking is complete."""
    return image_store_directory() / _fingerprint(path)


def _unpack(path: Path, limits: UnpackLimits, token: CancelToken) -> None:
    place, mark = image_store_directory(), _fingerprint(path)
    content = place / f"sha256-{_digest(path, token)}"
    with file_lock(Path(f"{content}.lock"), check=token.check):  # another archive of the same content
        if not content.is_dir():
            with staging_directory(content) as draft:
                _unpack_layers(draft, path, limits, token)
                if _fingerprint(path) != mark:
                    raise ArchiveError("it was changed meanwhile")
                draft.chmod(0o755)
                draft.rename(content)
    link = place / f".{mark}"
    link.unlink(missing_ok=True)  # of a process that was killed
    link.symlink_to(content.name)
    link.rename(place / mark)


@contextlib.contextmanager
def staging_directory(content: Path) -> Iterator[Path]:
    """A new, empty, locked directory for unpacking."""
    draft = content.with_name(f".{content.name}")
    with CleanupRecord("image-draft", REMOVE_STAGING, {"paths": [str(draft)], "lock": f"{content}.lock"}):
        try:
            remove_tree(draft)  # of a process that was killed at it
            draft.mkdir(mode=0o700)
            yield draft
        finally:
            remove_tree(draft)


def remove_staging(traces: dict[str, Any]) -> None:
    """Remove what a dead process left half unpacked, unless another process is unpacking the same image.

    Raises:
        OSError: something of it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Path(traces["lock"]).open("a") as lock:
        if try_lock(lock.fileno()):
            for path in traces["paths"]:
                remove_tree(path)


def _unpack_layers(draft: Path, path: Path, limits: UnpackLimits, token: CancelToken) -> None:
    with open_image(path, token, limits.max_length) as image, Unpacker(draft, limits, token) as unpacker:
        for layer in image.layers():
            unpacker.add(TarReader(layer, max_length=limits.max_length), layer=image.has_whiteouts)
        unpacker.remove_escaping_links()


def _digest(path: Path, token: CancelToken) -> str:
    """The digest of an archive's content; for a layout, of its index, which lists all else by digest."""
    digest = hashlib.sha256()
    with (path / INDEX if path.is_dir() else path).open("rb") as file:
        content = FileSlice(file, token)
        while piece := content.read(CHUNK_SIZE):
            digest.update(piece)
    return digest.hexdigest()

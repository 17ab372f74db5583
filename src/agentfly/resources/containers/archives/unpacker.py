"""Unpacker: unpacks hostile archives into a directory that nothing in them can escape."""

# an image has many thousands of files, which are reached by directory descriptors

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentfly.core.threads.run import CancelToken
from agentfly.resources.containers.archives.byte_readers import ArchiveError, MalformedArchive
from agentfly.resources.containers.archives.confined_directory import ConfinedDirectory, TooManySymlinks, join
from agentfly.resources.containers.archives.tar_reader import TarEntry, TarEntryType, TarReader

_WHITEOUT_PREFIX = ".wh."  # before the name of what a layer hides of those below it
_OPAQUE_WHITEOUT = ".wh..wh..opq"
_AUFS_PREFIX = ".wh..wh."  # what only that file system needs
_LONGEST_PATH, _LONGEST_NAME = 4096, 256  # bytes, as the kernel's
_MOST_NAMES = 10_000  # kept in memory, each of which may be long
_STEPS = 50  # names to be looked up for each entry, on average
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# errors that a name or a link in an archive can cause; other errors are the host's
_ENTRY_ERRNOS = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.EILSEQ,
    errno.EINVAL,
    errno.EMLINK,
    errno.EFBIG,
)


@dataclass(frozen=True)
class UnpackLimits:
    """Limits on the content of archives.

    Args:
        max_bytes: maximum size of all files, including the holes of sparse ones.
        max_entries: maximum number of files, directories and links.
        max_depth: maximum depth of directories.
    """

    max_bytes: int
    max_entries: int
    max_depth: int

    @property
    def max_length(self) -> int:
        """The largest size of an archive within these limits: the files, and 4 KiB of headers per entry."""
        return self.max_bytes + 4096 * self.max_entries + 2**20


class ArchiveTooLarge(ArchiveError):
    """An archive exceeds a limit.

    Attributes:
        limit: the name of the limit, as in `UnpackLimits`.
    """

    def __init__(self, limit: str, what: str) -> None:
        super().__init__(what)
        self.limit = limit


class Unpacker:
    """Unpacks archives into one directory, each over the earlier ones.

    Links are followed as if that directory were the root of the file system. Directories are opened without following
    links. So nothing outside is written, changed or removed, for any names, links and order of entries. All unpacked
    files belong to the caller, without set-user-id bits. Devices and pipes are skipped.

    Attributes:
        skipped: names of the entries that were not unpacked, at most the first 10,000.
    """

    def __init__(
        self, root: Path, limits: UnpackLimits, token: CancelToken | None = None, *, leaving_links: bool = True
    ) -> None:
        """Unpack into an existing directory.

        Args:
            root: the directory.
            limits: limits for all archives together.
            token: checked at each file; it may cancel the work.
            leaving_links: whether to keep symbolic links that lead out of the directory. The root file systems of
                containers need this: their links are relative to their own root.
        """
        self.skipped: list[str] = []
        self._token = token or CancelToken()
        self._directory = ConfinedDirectory(root, self._token)
        self._root_length = len(os.fsencode(root.absolute()))
        self._limits = limits
        self._bytes = 0
        self._entries = 0  # members
        self._directory_entries = 0  # those for which a directory was made
        self._leaving_links = leaving_links
        self._links: list[tuple[str, str]] = []  # the places of their directories, and their names
        self._places: dict[str, str] = {}  # of directories, by their names in the archive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.close()

    def add(self, archive: TarReader, *, layer: bool = False) -> None:
        """Unpack an archive over the present content.

        Args:
            archive: the archive, at its start.
            layer: whether it is a layer of an image, which may have whiteouts.

        Raises:
            ArchiveTooLarge: it exceeds a limit.
            ArchiveError: it is damaged, or has impossible names.
            OSError: the disk is full.
            WorkCancelled: the token was cancelled.
            TimeoutError: the token's time is up.
        """
        fresh: set[int] = set()  # the hashes of the places that this layer has something at, which it does not hide
        bare: set[str] = set()  # directories of which it hides all else
        while (member := archive.next()) is not None:
            self._token.check()
            parent, _, name = member.name.rstrip("/").rpartition("/")
            with self._naming_entry(member.name):
                place = self._resolve_parent(parent)
                if layer and name.startswith(_WHITEOUT_PREFIX):
                    self._apply_whiteout(place, name, fresh, bare)
                elif name not in ("", ".", ".."):  # the directory itself, which is there
                    self._put(archive, member, place, name)
                    if layer:
                        fresh.add(hash(join(place, name)))
            self._count()

    def remove_escaping_links(self) -> None:
        """Remove the symbolic links that lead out of the directory.

        Raises:
            ArchiveError: its links lead through too many others.
            WorkCancelled: the token was cancelled.
            TimeoutError: the token's time is up.
        """
        for place, name in self._links:
            self._check_lookups()
            target = self._directory.read_link(place, name)
            if target is not None and self._directory.escapes(place, target):
                self._directory.remove(place, name)
                self._skip(join(place, name))

    # --- members ----------------------------------------------------------------------------------------------------

    def _put(self, archive: TarReader, member: TarEntry, place: str, name: str) -> None:
        if member.kind is TarEntryType.DIRECTORY:
            self._put_directory(place, name, member.mode)
        elif member.kind is TarEntryType.FILE:
            self._put_file(archive, member, place, name)
        elif member.kind is TarEntryType.HARD_LINK:
            self._put_hard_link(member, place, name)
        elif member.kind is TarEntryType.SYMLINK and member.target:
            self._remove(place, name)
            os.symlink(member.target, name, dir_fd=self._ensure_directory(place))
            self._places.clear()
            if not self._leaving_links:
                self._links.append((place, name))
        else:
            self._skip(member.name)

    def _put_file(self, archive: TarReader, member: TarEntry, place: str, name: str) -> None:
        self._bytes += member.size
        if self._bytes > self._limits.max_bytes:
            raise ArchiveTooLarge("max_bytes", f"it holds more than {self._limits.max_bytes} bytes")
        self._remove(place, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=self._ensure_directory(place))
        try:
            end = 0
            for position, piece in archive.read_data():
                self._token.check()
                _write(file, piece, position)
                end = position + len(piece)
            if end < member.size:  # a hole
                os.ftruncate(file, member.size)
            os.fchmod(file, member.mode & 0o777)
            if member.modified is not None:
                os.utime(file, (member.modified, member.modified))
        finally:
            os.close(file)

    def _put_directory(self, place: str, name: str, mode: int) -> None:
        here = join(place, name)
        if self._directory.read_link(place, name) is not None:
            if self._directory.open_directory(self._directory.resolve(here)) is not None:
                return  # a layer may name the directory that a link below it leads to
        elif self._directory.open_directory(here) is not None:
            self._set_mode(here, mode)
            return
        self._remove(place, name)
        self._ensure_directory(place)
        self._directory_entries += 1
        self._set_mode(here, mode)

    def _set_mode(self, place: str, mode: int) -> None:
        """Set the permissions of a directory, created if missing. Its owner keeps full access, for later entries."""
        directory = os.open(".", _READ, dir_fd=self._ensure_directory(place))
        try:
            os.fchmod(directory, (mode & 0o1777) | stat.S_IRWXU)
        finally:
            os.close(directory)

    def _put_hard_link(self, member: TarEntry, place: str, name: str) -> None:
        parent, _, other = member.target.rstrip("/").rpartition("/")
        from_place = self._directory.resolve(parent)
        found = self._directory.open_directory(from_place)
        if found is None or other in ("", ".", "..") or not _is_file(found, other):
            self._skip(member.name)
            return
        if (from_place, other) == (place, name):
            return
        self._remove(place, name)
        source = self._directory.open_directory(from_place)
        if source is None:  # it was in what has just been removed
            self._skip(member.name)
            return
        source = os.dup(source)
        try:
            os.link(other, name, src_dir_fd=source, dst_dir_fd=self._ensure_directory(place), follow_symlinks=False)
        finally:
            os.close(source)

    def _apply_whiteout(self, place: str, name: str, fresh: set[int], bare: set[str]) -> None:
        """Apply a whiteout: remove what the lower layers have in a directory."""
        hidden = name.removeprefix(_WHITEOUT_PREFIX)
        if name != _OPAQUE_WHITEOUT:
            if hidden in ("", ".", ".."):
                raise MalformedArchive("such a name hides nothing that a layer may hide")
            if not name.startswith(_AUFS_PREFIX):
                self._remove(place, hidden)
            return
        directory = self._directory.open_directory(place)
        if directory is None or place in bare:
            return
        bare.add(place)
        listed = os.open(".", _READ, dir_fd=directory)
        try:
            below = os.listdir(listed)  # noqa: PTH208  (no path leads there for certain)
        finally:
            os.close(listed)
        for one in below:
            if hash(join(place, one)) not in fresh:
                self._remove(place, one)

    # --- places -----------------------------------------------------------------------------------------------------

    def _resolve_parent(self, name: str) -> str:
        """Return the place of the directory that contains an archive's name."""
        place = self._places.get(name)
        if place is None:
            if len(self._places) >= _MOST_NAMES:
                self._places.clear()
            place = self._places[name] = self._directory.resolve(name)
            self._check_lookups()
        return place

    def _ensure_directory(self, place: str) -> int:
        """Return a descriptor of a directory, created if missing."""
        if place.count("/") >= self._limits.max_depth:
            raise ArchiveTooLarge(
                "max_depth", f"it holds more than {self._limits.max_depth} directories one in the other"
            )
        if self._root_length + len(os.fsencode(place)) + _LONGEST_NAME > _LONGEST_PATH:
            raise MalformedArchive("its files would have paths that are too long for the system")
        return self._directory.make_directory(place)

    def _remove(self, place: str, name: str) -> None:
        if self._directory.remove(place, name) in ("directory", "link"):
            self._places.clear()

    def _skip(self, name: str) -> None:
        if len(self.skipped) < _MOST_NAMES:
            self.skipped.append(name)

    def _count(self) -> None:
        self._entries += 1
        if self._entries + self._directory.directories_made - self._directory_entries > self._limits.max_entries:
            raise ArchiveTooLarge("max_entries", f"it holds more than {self._limits.max_entries} files and directories")

    def _check_lookups(self) -> None:
        """Refuse an archive whose links lead through links too often. An honest archive needs few lookups per entry."""
        if self._directory.lookups > _STEPS * (self._limits.max_entries + _STEPS):
            raise ArchiveTooLarge("max_entries", "its links lead through too many others")

    @contextmanager
    def _naming_entry(self, name: str) -> Iterator[None]:
        """Add the name of the entry to errors in the block."""
        try:
            yield
        except MalformedArchive as error:
            raise MalformedArchive(f"{name[:200]!r}: {error}") from error
        except TooManySymlinks:
            raise MalformedArchive(f"{name[:200]!r} leads through too many links") from None
        except OSError as error:
            if error.errno not in _ENTRY_ERRNOS:
                raise
            raise MalformedArchive(f"{name[:200]!r} cannot be: {os.strerror(error.errno)}") from error


def _write(file: int, piece: bytes, position: int) -> None:
    left = memoryview(piece)
    while left:
        written = os.pwrite(file, left, position)
        left, position = left[written:], position + written


def _is_file(directory: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False

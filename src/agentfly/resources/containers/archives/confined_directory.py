"""ConfinedDirectory: a directory in which names are looked up as if it were the root of the file system."""

# names are looked up by directory descriptors, for very many files
# ruff: noqa: PTH123

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Self

from agentfly.core.threads.run import CancelToken
from agentfly.core.tree_removal import remove_tree_at

_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40  # followed for one name, as the kernel does
_KEPT_OPEN = 64


class TooManySymlinks(Exception):
    """A path leads through more symbolic links than the kernel would follow."""


class ConfinedDirectory:
    """Finds, creates and removes entries below a directory, and touches nothing outside, for any names and links.

    A *place* is a path after all links were followed: names from the directory on, separated by slashes. The directory
    itself is the empty place. Each step opens one directory from the descriptor of its parent and never follows a link.
    So a directory that was replaced by a link is not entered.

    Attributes:
        lookups: number of names looked up to follow links.
        directories_made: number of directories that `make_directory` created.
    """

    def __init__(self, path: Path, token: CancelToken | None = None) -> None:
        """Open the directory.

        Args:
            path: the directory; its path may lead through links.
            token: checked at each step; it may cancel the work.

        Raises:
            OSError: there is no such directory.
        """
        self.lookups = 0
        self.directories_made = 0
        self._token = token or CancelToken()
        self._root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (*self._open.values(), self._root):
            os.close(descriptor)
        self._open.clear()

    # --- places -----------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> str:
        """Return the place of a name, as seen from inside. It need not exist.

        Raises:
            TooManySymlinks: it leads through too many links.
        """
        place = self._walk([], name, inside=True)
        assert place is not None
        return place

    def escapes(self, place: str, target: str) -> bool:
        """Return whether a link would lead out of the directory, as seen from outside.

        From outside, a target that begins with a slash starts at the host's root. A chain of too many links counts as
        leading out.

        Args:
            place: the directory that contains the link.
            target: the link's target.
        """
        if target.startswith("/"):
            return True
        try:
            return self._walk(place.split("/") if place else [], target, inside=False) is None
        except TooManySymlinks:
            return True

    def read_link(self, place: str, name: str) -> str | None:
        """Return the target of a symbolic link; None if the name is not a link."""
        directory = self.open_directory(place)
        if directory is None:
            return None
        try:
            return os.readlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def _walk(self, here: list[str], target: str, *, inside: bool) -> str | None:
        """Return the place that a path leads to from another place; None if it leads out."""
        ahead = target.split("/")[::-1]
        links = 0
        missing: int | None = None  # how long the first part of `here` is that is not there
        while ahead:
            self._token.check()
            self.lookups += 1
            part = ahead.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not here and not inside:
                    return None
                del here[-1:]
                missing = None if missing is None or len(here) < missing else missing
                continue
            directory = self.open_directory("/".join(here)) if missing is None else None
            try:
                further = None if directory is None else os.readlink(part, dir_fd=directory)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENAMETOOLONG):
                    raise
                further = None
                directory = directory if error.errno == errno.EINVAL else None
            if further is None:
                here.append(part)
                if directory is None and missing is None:
                    missing = len(here)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise TooManySymlinks(target)
            if further.startswith("/"):
                if not inside:
                    return None
                here.clear()
            ahead += further.split("/")[::-1]
        return "/".join(here)

    # --- directories ------------------------------------------------------------------------------------------------

    def open_directory(self, place: str) -> int | None:
        """Return a descriptor of a directory, valid until the next call; None if there is no such directory."""
        try:
            return self._descriptor(place, make=False)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            return None

    def make_directory(self, place: str) -> int:
        """Return a descriptor of a directory, created with its parents if missing. It is valid until the next call.

        Raises:
            OSError: a name is invalid, or exists and is not a directory.
        """
        return self._descriptor(place, make=True)

    def remove(self, place: str, name: str) -> str | None:
        """Remove an entry of a directory, with its content.

        Returns:
            The type of the removed entry: ``"directory"``, ``"link"`` or ``"file"``; None if there was none.

        Raises:
            OSError: it cannot be removed.
        """
        directory = self.open_directory(place)
        if directory is None:
            return None
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(mode):
            self._evict(join(place, name))
            remove_tree_at(directory, name)
            return "directory"
        os.unlink(name, dir_fd=directory)
        return "link" if stat.S_ISLNK(mode) else "file"

    def _descriptor(self, place: str, *, make: bool) -> int:
        known, ahead = self._root, place.split("/") if place else []
        behind: list[str] = []
        for length in range(len(ahead), 0, -1):
            begun = "/".join(ahead[:length])
            if begun in self._open:
                self._open.move_to_end(begun)
                known, behind, ahead = self._open[begun], ahead[:length], ahead[length:]
                break
        for name in ahead:
            try:
                entered = os.open(name, _HANDLE, dir_fd=known)
            except FileNotFoundError:
                if not make:
                    raise
                os.mkdir(name, 0o755, dir_fd=known)
                self.directories_made += 1
                entered = os.open(name, _HANDLE, dir_fd=known)
            behind.append(name)
            self._keep("/".join(behind), entered)
            known = entered
        return known

    def _keep(self, place: str, descriptor: int) -> None:
        self._open[place] = descriptor
        if len(self._open) > _KEPT_OPEN:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)

    def _evict(self, place: str) -> None:
        for known in [known for known in self._open if known == place or known.startswith(f"{place}/")]:
            os.close(self._open.pop(known))

    # --- files ------------------------------------------------------------------------------------------------------

    def is_file(self, name: str) -> bool:
        """Return whether a name is a file, as seen from inside."""
        return self._file(name) is not None

    def read_file(self, name: str, most: int) -> bytes | None:
        """Return the content of a file, as seen from inside, at most `most` bytes; None if there is no such file."""
        found = self._file(name)
        if found is None:
            return None
        descriptor = os.open(found[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=found[0])
        with open(descriptor, "rb") as file:
            return file.read(most)

    def _file(self, name: str) -> tuple[int, str] | None:
        """Return the directory of a file and its name there, as seen from inside."""
        try:
            place, _, last = self.resolve(name).rpartition("/")
            directory = self.open_directory(place)
            if directory is None or not last:
                return None
            mode = os.stat(last, dir_fd=directory, follow_symlinks=False).st_mode
        except TooManySymlinks:
            return None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                raise
            return None
        return (directory, last) if stat.S_ISREG(mode) else None


def join(place: str, name: str) -> str:
    """Return the place of a name in a directory."""
    return f"{place}/{name}" if place else name

"""Work: what an agent has left in its box, taken out to be laid into another."""

from __future__ import annotations

import posixpath
import shlex
import shutil
from pathlib import Path

from agentfly.resources.containers.container import Container
from agentfly.threads.pool import on_thread

CHANGES_TESTS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py"}
)
"""Files that change how tests run, wherever they are, and so are never taken from an agent."""

COMPILED = frozenset({"__pycache__"})
"""Directories of code that may be other than its source."""

COMPILED_FILES = (".pyc", ".pyo", ".pth")


class Work:
    """Files and directories of an agent's box, as copies on this machine.

    Args:
        folder: where the copies are; the caller removes it.

    Attributes:
        left_out: paths of what was not taken, because it would change how tests run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: list[tuple[str, Path]] = []
        self.left_out: list[str] = []

    async def take(self, box: Container, path: str, max_bytes: int) -> None:
        """Copy a file or directory out of a box.

        Raises:
            ToolError: it is not there, or is too large.
            ResourceError: there is no room on this machine.
            ResourceDied: the box has ended.
        """
        if _changes_tests(posixpath.basename(path)):
            self.left_out.append(path)
            return
        copy = self._folder / str(len(self._copies))
        lost = await box.download(path, copy, max_bytes=max_bytes)
        removed = await on_thread(_without_what_changes_tests, copy)
        self.left_out += [posixpath.join(path, each) for each in (*lost, *removed)]
        self._copies.append((path, copy))

    async def lay(self, box: Container) -> None:
        """Put the work into another box, in the place of what that has there.

        Raises:
            ToolError: there is no room for it.
            ResourceDied: the box has ended.
        """
        for path, copy in self._copies:
            at = shlex.quote(path)
            clear = f"if [ -d {at} ] && [ ! -L {at} ]; then find {at} -mindepth 1 -delete; else rm -f -- {at}; fi"
            await box.run(clear, new_process=True)
            await box.upload(copy, path)


def _without_what_changes_tests(copy: Path) -> list[str]:
    """Remove from a copy what would change how tests run; the paths within it."""
    removed: list[str] = []
    if not copy.is_dir():
        return removed
    for path in sorted(copy.rglob("*"), key=lambda path: len(path.parts)):
        if not _changes_tests(path.name) or not (path.is_symlink() or path.exists()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(str(path.relative_to(copy)))
    return removed


def _changes_tests(name: str) -> bool:
    return name in CHANGES_TESTS or name in COMPILED or name.endswith(COMPILED_FILES)

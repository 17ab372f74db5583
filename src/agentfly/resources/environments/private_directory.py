"""PrivateDirectory: the working and temporary directory of a simulator's process, removed with the process."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree


class PrivateDirectory:
    """A directory of one process that no other user may enter.

    Args:
        name: a part of its name.

    Attributes:
        path: its path, valid before the directory exists.
    """

    def __init__(self, name: str) -> None:
        safe = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)[:40]
        self.path = Path(tempfile.gettempdir(), f"agentfly-{safe}-{secrets.token_hex(6)}")

    @property
    def work(self) -> str:
        """The default working directory of the process."""
        return str(self.path / "work")

    @property
    def temporary(self) -> str:
        """The directory for temporary files of the process."""
        return str(self.path / "tmp")

    def make(self) -> None:
        """Create the directory, empty.

        Raises:
            OSError: it cannot be created.
        """
        self.path.mkdir(mode=0o700)
        Path(self.work).mkdir()
        Path(self.temporary).mkdir()

    async def remove(self) -> None:
        """Remove the directory with its content. Do nothing if it is gone.

        Raises:
            OSError: a part of it cannot be removed.
        """
        if not self.try_remove_empty():
            await run_in_thread(remove_tree, self.path)

    def try_remove_empty(self) -> bool:
        """Remove the directory if it is empty, which is the usual case. Return whether it is gone."""
        try:
            for path in (Path(self.work), Path(self.temporary), self.path):
                path.rmdir()
        except FileNotFoundError:
            return not self.path.exists()
        except OSError:
            return False
        return True

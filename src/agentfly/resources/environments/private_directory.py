"""PrivateDirectory: the working and temporary directory of a simulator's process, removed with the process."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree


class PrivateDirectory:
    """A directory of one process. No other user may enter it.

    Args:
        name: a part of its name.

    Attributes:
        path: its path, also before it exists.
    """

    def __init__(self, name: str) -> None:
        safe = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)[:40]
        self.path = Path(tempfile.gettempdir(), f"agentfly-{safe}-{secrets.token_hex(6)}")

    @property
    def work(self) -> str:
        """The directory that the process works in, unless it has another."""
        return str(self.path / "work")

    @property
    def temporary(self) -> str:
        """The directory for its temporary files."""
        return str(self.path / "tmp")

    def make(self) -> None:
        """Make it, empty.

        Raises:
            OSError: it cannot be made.
        """
        self.path.mkdir(mode=0o700)
        Path(self.work).mkdir()
        Path(self.temporary).mkdir()

    async def remove(self) -> None:
        """Remove it with all that is in it; fine if it is gone.

        Raises:
            OSError: something in it cannot be removed.
        """
        if not self.try_remove_empty():
            await run_in_thread(remove_tree, self.path)

    def try_remove_empty(self) -> bool:
        """Remove it if nothing is in it, as a rule, or it is gone; whether that was so."""
        try:
            for path in (Path(self.work), Path(self.temporary), self.path):
                path.rmdir()
        except FileNotFoundError:
            return not self.path.exists()
        except OSError:
            return False
        return True

"""CleanupRecord: what must be removed if this process is killed before it does so itself."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from agentfly.errors import PrerequisiteError
from agentfly.resources.ledger import RECORD, Entry, Ledger, spare_directories, state_directory
from agentfly.resources.tree_removal import remove_tree

logger = logging.getLogger(__name__)

DIRECTORY = "agentfly.resources.cleanup_record:remove_directory"
"""The address of the function that removes a directory, by ``{"directory": path}``."""


class CleanupRecord:
    """An entry in a ledger of its own, for what is no instance of an engine but would outlive this process too.

    Such are what is tried to learn what the machine can do, what is half unpacked, and files for other processes. Make
    the record before there is anything, and close it when all is gone. If the process dies before, the next engine or
    ``agentfly resources reap`` removes what is left.

    Where no ledger can be written the record does nothing, so that a look at the machine (``agentfly doctor``) never
    fails for it; an engine can start nothing there either.
    """

    def __init__(self, kind: str, reap: str, traces: Mapping[str, Any]) -> None:
        """Write it down.

        Args:
            kind: what it is, for people.
            reap: the address of the function that removes it by its traces, as for `Entry`.
            traces: what that function needs; JSON-able.
        """
        self._instance = f"{kind}-{uuid.uuid4().hex[:8]}"
        self._ledger: Ledger | None = Ledger(_directory(), RECORD)
        try:
            self._ledger.write(Entry(self._instance, kind, reap, traces, time.time()))
        except PrerequisiteError as error:
            logger.debug("%s is not written down: %s", self._instance, error)
            self._ledger = None

    def close(self) -> None:
        """Forget it: it is gone. Safe to call again."""
        if self._ledger is not None:
            self._ledger.gone(self._instance)
            self._ledger.close()
            self._ledger = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_directory(traces: dict[str, Any]) -> None:
    """Remove a directory with all that is in it. Fine if it is not there.

    Raises:
        OSError: something of it cannot be removed.
    """
    remove_tree(traces["directory"])


def _directory() -> Path:
    with contextlib.suppress(PrerequisiteError):
        return state_directory()
    spare = spare_directories()[0]
    with contextlib.suppress(OSError):
        spare.mkdir(mode=0o700, exist_ok=True)
    return spare

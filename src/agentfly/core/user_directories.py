"""Directories of the user: the cache, for data that can be created again, and the state of what runs."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from agentfly.core.errors import PrerequisiteError


def cache_root() -> Path:
    """Return the directory for data that can be fetched or created again.

    It is ``$AGENTFLY_CACHE_DIR`` if set, else the user's cache directory.

    Raises:
        PrerequisiteError: the variable is not set, and the user has no home directory.
    """
    if chosen := os.environ.get("AGENTFLY_CACHE_DIR"):
        return Path(chosen)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "agentfly"
    try:
        return Path.home() / ".cache" / "agentfly"
    except RuntimeError as error:
        raise PrerequisiteError(
            f"Models and images are kept in a directory of the user, but user {os.getuid()} has no home: {error} Set "
            "AGENTFLY_CACHE_DIR to a writable directory."
        ) from error


def state_directory(chosen: Path | None = None) -> Path:
    """Return the directory for ledgers and other state.

    It is ``chosen``, ``$AGENTFLY_STATE_DIR``, or ``agentfly`` in ``$XDG_STATE_HOME`` or ``~/.local/state``.

    Raises:
        PrerequisiteError: none of these is set, and the user has no home directory.
    """
    if chosen is not None:
        return chosen
    if own := os.environ.get("AGENTFLY_STATE_DIR"):
        return Path(own)
    if home := os.environ.get("XDG_STATE_HOME"):
        return Path(home) / "agentfly"
    try:
        return Path.home() / ".local" / "state" / "agentfly"
    except RuntimeError as error:
        raise PrerequisiteError(
            f"Started instances are recorded in a directory of the user, but user {os.getuid()} has no home: {error} "
            "Set AGENTFLY_STATE_DIR to a writable directory that outlives this process."
        ) from error


def fallback_state_directories() -> list[Path]:
    """Return the directories used when the state directory is not writable: in memory, or in a temporary directory.

    Only the user can write there. They are searched for orphans too.
    """
    user = os.geteuid()
    return [Path(f"/dev/shm/agentfly-state-{user}"), Path(tempfile.gettempdir()) / f"agentfly-state-{user}"]


def state_directories(chosen: Path | None = None) -> list[Path]:
    """Return the state directory and the existing fallbacks."""
    return [state_directory(chosen), *filter(is_own_directory, fallback_state_directories())]


def is_own_directory(directory: Path) -> bool:
    """Return whether a directory belongs to the user and no other user can write there."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_accessible(path: Path) -> bool:
    """Return whether a path exists and this user can see it."""
    return os.access(path, os.F_OK)

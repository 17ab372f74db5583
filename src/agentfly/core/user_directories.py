"""The directories of the user that AgentFly keeps things in, which there may be none of, or which may be closed."""

from __future__ import annotations

import os
from pathlib import Path

from agentfly.core.errors import PrerequisiteError


def cache_root() -> Path:
    """Return the directory for data that can be fetched or made again.

    It is ``$AGENTFLY_CACHE_DIR`` if set, else the user's cache directory.

    Raises:
        PrerequisiteError: neither is set, and the user has no home directory.
    """
    if chosen := os.environ.get("AGENTFLY_CACHE_DIR"):
        return Path(chosen)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "agentfly"
    try:
        return Path.home() / ".cache" / "agentfly"
    except RuntimeError as error:
        raise PrerequisiteError(
            f"Models and images are kept in a directory of the user, and user {os.getuid()} has no home: {error} Set "
            "AGENTFLY_CACHE_DIR to a directory that can be written."
        ) from error


def is_accessible(path: Path) -> bool:
    """Whether this user can see that something is at a path; what may not be looked at is not seen."""
    return os.access(path, os.F_OK)

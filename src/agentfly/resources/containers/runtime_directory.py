"""The directories of sandboxes on the host: where they are, what they contain, and their removal."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.core.tree_removal import remove_tree

SANDBOX_UID = 61_000  # host uid of root's sandboxes; Debian and systemd assign it to nobody
SHELL_DIRECTORY = "shell"  # the shell's part of a sandbox's directory
CONFINE_PROGRAM = "confine.py"  # the program that runs a sandbox without namespaces
GROUPS = "cgroups"  # the file that lists a sandbox's control groups


def sandbox_uid() -> int:
    """The host uid of sandboxes: this process's user, but never root."""
    return os.geteuid() or SANDBOX_UID


def runtime_directory() -> Path:
    """The directory for this user's sandboxes on the host. For small, short-lived files only.

    Raises:
        PrerequisiteError: no candidate can be written, or another user owns it.
    """
    user = os.geteuid()
    owner = sandbox_uid()
    own = Path("/run") if user == 0 else Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    shared = Path(tempfile.gettempdir())
    places = (  # in memory, if it can be
        Path(f"/dev/shm/agentfly-{user}"),
        own / "agentfly",
        shared / f"agentfly-{user}",
    )
    for directory in places:
        try:
            directory.mkdir(mode=0o711, exist_ok=True)
            if user == 0 and directory.lstat().st_uid == 0:
                os.chown(directory, owner, owner, follow_symlinks=False)
            found = directory.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == owner:  # otherwise another user owns it
            restore_owner_access(directory)
            return directory
    raise PrerequisiteError(
        "Sandboxes need a directory for their pipes, and none of /run, /dev/shm, $XDG_RUNTIME_DIR and the directory "
        f"for temporary files ({tempfile.gettempdir()}) can be written. Set TMPDIR to one that can."
    )


def traces(instance: str) -> dict[str, Any]:
    """Return what reaping needs to remove an instance: its directory.

    The directory lists the control groups, and the command lines of its processes contain its path. bubblewrap and
    Landlock use the same.
    """
    return {"scratch": str(runtime_directory() / instance)}


def remove_sandbox_directory(scratch: Path) -> None:
    """Remove a sandbox's directory; fine if it is gone. Only for a thread that does not see the sandboxes' mounts.

    Raises:
        OSError: something of it cannot be removed.
    """
    for directory in (scratch.parent.parent, scratch.parent):
        restore_owner_access(directory)
    remove_tree(scratch)


def restore_owner_access(directory: Path) -> None:
    """Restore the sandbox user's access to its own directory, which a sandbox without namespaces may have removed."""
    try:
        handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        found = os.fstat(handle)
        if found.st_uid == sandbox_uid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            # by /proc, because neither fchmod nor a no-follow call takes an O_PATH descriptor
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(found.st_mode) | stat.S_IRWXU)  # noqa: PTH101
    finally:
        os.close(handle)

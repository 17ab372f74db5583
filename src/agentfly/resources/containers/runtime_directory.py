"""The directories on the host that belong to sandboxes: where they are, what is in them, and their removal."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.core.tree_removal import remove_tree

SANDBOX_UID = 61_000  # what root's sandboxes are on the host; allotted to nobody by Debian or systemd
SHELL_DIRECTORY = "shell"  # what a sandbox's directory has for its shell
CONFINE_PROGRAM = "confine.py"  # the program that attends to a sandbox without namespaces
GROUPS = "cgroups"  # the file in a sandbox's directory that names its control groups


def sandbox_uid() -> int:
    """The host's user that sandboxes are: this one, but never root."""
    return os.geteuid() or SANDBOX_UID


def runtime_directory() -> Path:
    """Where this user's sandboxes have their directories on the host. Short-lived, small files only.

    Raises:
        PrerequisiteError: there is no place that can be written, or somebody else has taken it.
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
        if stat.S_ISDIR(found.st_mode) and found.st_uid == owner:  # else somebody else's
            restore_owner_access(directory)
            return directory
    raise PrerequisiteError(
        "Sandboxes need a directory for their pipes, and none of /run, /dev/shm, $XDG_RUNTIME_DIR and the directory "
        f"for temporary files ({tempfile.gettempdir()}) can be written. Set TMPDIR to one that can."
    )


def traces(instance: str) -> dict[str, Any]:
    """What `reaping.reap` needs to remove an instance: its directory, which names its control groups, and by which its
    processes are known. The same whether bubblewrap starts it or Landlock confines it.
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
    """Let the sandboxes' user into a directory of its own: sandboxes without namespaces may have closed it to all."""
    try:
        handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        found = os.fstat(handle)
        if found.st_uid == sandbox_uid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            # by its number, because neither fchmod nor a call that follows no links takes such a handle
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(found.st_mode) | stat.S_IRWXU)  # noqa: PTH101
    finally:
        os.close(handle)

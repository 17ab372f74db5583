"""SnapshotStore: copies of sandboxes' private layers, for use as lower layers of new sandboxes.

A copy is made while the processes of the sandbox are stopped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from agentfly.core.errors import ResourceError, ResourceStartError, ToolError
from agentfly.core.threads.run import CancelToken
from agentfly.resources.containers.bubblewrap.syscalls import MS_NODEV, MS_NOSUID, mount, unmount
from agentfly.resources.containers.spec import SnapshotImage, snapshot_name

logger = logging.getLogger(__name__)

BACKEND = "bubblewrap"
COPY_TIMEOUT_S = 120.0
"""The time limit for copying the files of a sandbox, in seconds."""
_TOO_LONG = os.strerror(errno.ENAMETOOLONG)
_MAX_ERROR_BYTES = 4096  # of error output
_POLL_S = 0.05
_MAX_LAYERS_BYTES = 3800  # of a list of layers; the options of mount(2) fill at most one page


@dataclass(frozen=True)
class LayerSnapshot:
    """A snapshot, complete or being copied.

    Args:
        directory: the mount point of its own file system, in memory.
        layers: the lower layers of sandboxes started from it, by directory in the root.
    """

    directory: Path
    layers: dict[str, str]


class SnapshotStore:
    """The snapshots of one launcher. Its launching thread alone sees their mounts, and calls all but `copy_layers`."""

    def __init__(self, home: Path) -> None:
        """Create the store in a new directory."""
        self._home = home
        self._home.mkdir()
        self._snapshots: dict[str, LayerSnapshot] = {}
        self._released: deque[str] = deque()  # names; appended on any thread
        self._to_remove: list[LayerSnapshot] = []
        self._count = 0
        # the launching thread's view of the mounts, as other threads reach it
        self._thread_root = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/root"

    def layers(self, image: str) -> dict[str, str]:
        """Return the lower layers of a sandbox that is started from a snapshot.

        Raises:
            ResourceStartError: this process has no such snapshot, or no longer has it.
        """
        self.remove_unreferenced()
        found = self._snapshots.get(snapshot_name(image, BACKEND) or "")
        if found is None:
            raise ResourceStartError(
                f"ContainerSpec(image={image!r}): there is no such snapshot in this process. A snapshot lasts as long "
                "as the spec that fork() returned is referenced, in the process that created it."
            )
        return found.layers

    def create(self, layers: dict[str, str], size: int) -> LayerSnapshot:
        """Create the file system of a snapshot of private layers over these lower layers.

        Raises:
            ResourceError: there are too many layers over each other.
        """
        self.remove_unreferenced()
        directory = self._home / str(self._count)
        self._count += 1
        over = {name: f"{directory}/upper{number}:{below}" for number, (name, below) in enumerate(layers.items())}
        if max(map(len, over.values())) > _MAX_LAYERS_BYTES:
            depth = max(below.count(":") for below in layers.values())
            raise ResourceError(f"fork(): {depth} layers lie over each other, and the kernel allows no more.")
        directory.mkdir()
        mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=0711")
        return LayerSnapshot(directory, over)

    def copy_layers(self, token: CancelToken, snapshot: LayerSnapshot, tree: Path) -> None:
        """Copy private layers while no process changes them, with the attributes that overlayfs sets. Needs root.

        Raises:
            ToolError: the directories are too deep to be copied, which the agent caused.
            ResourceError: they could not be copied.
            WorkCancelled: the token was cancelled.
        """
        program = shutil.which("cp", path="/usr/bin:/bin") or "cp"
        uppers = [f"{self._thread_root}{tree}/upper{number}" for number in range(len(snapshot.layers))]
        words = [program, "-a", "-t", f"{self._thread_root}{snapshot.directory}", "--", *uppers]
        try:
            code, error_output = _run(token, words)
        except TimeoutError as error:
            raise ResourceError(f"fork(): copying the private files of the sandbox took too long: {error}") from error
        if code:
            kind = ToolError if _TOO_LONG in error_output else ResourceError
            raise kind(f"fork(): the private files of the sandbox could not be copied: …{error_output[-200:].strip()}")

    def publish(self, snapshot: LayerSnapshot) -> SnapshotImage:
        """Return the image of a copied snapshot. The snapshot lasts as long as this object."""
        name = f"{os.getpid()}-{snapshot.directory.name}"
        self._snapshots[name] = snapshot
        return SnapshotImage(BACKEND, name, lambda: self._released.append(name))

    def remove(self, snapshot: LayerSnapshot) -> None:
        """Free the memory of a snapshot once no sandbox uses it. `remove_unreferenced` retries a failed removal."""
        self._to_remove.append(snapshot)
        self._remove_pending()

    def remove_unreferenced(self) -> None:
        """Remove the snapshots that are no longer referenced."""
        while self._released:
            self._to_remove.append(self._snapshots.pop(self._released.popleft()))
        self._remove_pending()

    def _remove_pending(self) -> None:
        discarded, self._to_remove = self._to_remove, []
        for snapshot in discarded:
            try:
                unmount(snapshot.directory)
                with contextlib.suppress(FileNotFoundError):
                    snapshot.directory.rmdir()
            except OSError as error:
                logger.warning("A snapshot cannot be removed yet and may still take memory: %s", error)
                self._to_remove.append(snapshot)


def _run(token: CancelToken, words: list[str]) -> tuple[int, str]:
    """Run a program until it ends or the token is cancelled. Return its exit code and the end of its error output."""
    error_output = b""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", env={"LC_ALL": "C"}
    )
    with process:
        assert process.stderr is not None
        try:
            while True:
                token.check()
                if select.select([process.stderr], [], [], _POLL_S)[0]:
                    piece = os.read(process.stderr.fileno(), 2**16)
                    if not piece:
                        break
                    error_output = (error_output + piece)[-_MAX_ERROR_BYTES:]
        except BaseException:
            process.kill()
            raise
    return process.returncode, error_output.decode(errors="replace")

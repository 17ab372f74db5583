"""SnapshotStore: copies of sandboxes' private layers, made while their processes are stopped, as layers of new
sandboxes.
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
"""Seconds that the files of a sandbox may take to be copied."""
_TOO_LONG = os.strerror(errno.ENAMETOOLONG)
_COMPLAINT = 4096  # bytes
_LOOK_S = 0.05
_LONGEST = 3800  # bytes of a list of layers; mount(2) takes a page of options


@dataclass(frozen=True)
class LayerSnapshot:
    """A snapshot that is being made, or was.

    Args:
        place: the file system of its own that holds it, in memory.
        layers: what sandboxes made from it have below their private layers, by where in the root.
    """

    place: Path
    layers: dict[str, str]


class SnapshotStore:
    """The snapshots of one launcher. Only its thread sees their mounts, and calls all methods but `copy_layers`."""

    def __init__(self, home: Path) -> None:
        """Keep them below a directory."""
        self._home = home
        self._home.mkdir()
        self._made: dict[str, LayerSnapshot] = {}
        self._dropped: deque[str] = deque()  # filled on any thread
        self._discarded: list[LayerSnapshot] = []  # which are to be removed
        self._count = 0
        # what the launching thread sees, for others of this process
        self._seen = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/root"

    def layers(self, image: str) -> dict[str, str]:
        """What lies below the private layers of a sandbox made from a snapshot.

        Raises:
            ResourceStartError: it is no snapshot of this process, or nobody held it any more.
        """
        self.remove_unreferenced()
        found = self._made.get(snapshot_name(image, BACKEND) or "")
        if found is None:
            raise ResourceStartError(
                f"ContainerSpec(image={image!r}): there is no such snapshot in this process. A snapshot lasts as long "
                "as somebody holds the spec that fork() returned, in the process that made it."
            )
        return found.layers

    def create(self, layers: dict[str, str], size: int) -> LayerSnapshot:
        """Make room for a snapshot of private layers that lie over these.

        Raises:
            ResourceError: there are too many of them, one over the other.
        """
        self.remove_unreferenced()
        place = self._home / str(self._count)
        self._count += 1
        over = {name: f"{place}/upper{number}:{below}" for number, (name, below) in enumerate(layers.items())}
        if max(map(len, over.values())) > _LONGEST:
            depth = max(below.count(":") for below in layers.values())
            raise ResourceError(f"fork(): {depth} layers lie over each other here, and the kernel takes no more.")
        place.mkdir()
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=0711")
        return LayerSnapshot(place, over)

    def copy_layers(self, token: CancelToken, snapshot: LayerSnapshot, tree: Path) -> None:
        """Copy private layers, in which nothing moves, with all that an overlay notes about them. Needs root.

        Raises:
            ToolError: they could not be copied for how deep they are, which is the doing of who made them.
            ResourceError: they could not be copied.
            Cancelled: the token says so.
        """
        program = shutil.which("cp", path="/usr/bin:/bin") or "cp"
        uppers = [f"{self._seen}{tree}/upper{number}" for number in range(len(snapshot.layers))]
        words = [program, "-a", "-t", f"{self._seen}{snapshot.place}", "--", *uppers]
        try:
            code, complaint = _run(token, words)
        except TimeoutError as error:
            raise ResourceError(f"fork(): copying the private files of the sandbox was given up: {error}") from error
        if code:
            kind = ToolError if _TOO_LONG in complaint else ResourceError
            raise kind(f"fork(): the private files of the sandbox could not be copied: …{complaint[-200:].strip()}")

    def publish(self, snapshot: LayerSnapshot) -> SnapshotImage:
        """Give a snapshot that has been filled its name, which is what holds it."""
        name = f"{os.getpid()}-{snapshot.place.name}"
        self._made[name] = snapshot
        return SnapshotImage(BACKEND, name, lambda: self._dropped.append(name))

    def remove(self, snapshot: LayerSnapshot) -> None:
        """Free the memory of a snapshot, as soon as no sandbox made from it is left.

        What of it cannot be removed now is tried again by `clear`.
        """
        self._discarded.append(snapshot)
        self._remove_discarded()

    def remove_unreferenced(self) -> None:
        """Discard those that nobody holds any more."""
        while self._dropped:
            self._discarded.append(self._made.pop(self._dropped.popleft()))
        self._remove_discarded()

    def _remove_discarded(self) -> None:
        discarded, self._discarded = self._discarded, []
        for snapshot in discarded:
            try:
                unmount(snapshot.place)
                with contextlib.suppress(FileNotFoundError):
                    snapshot.place.rmdir()
            except OSError as error:
                logger.warning("A snapshot may still take memory, because it cannot be removed yet: %s", error)
                self._discarded.append(snapshot)


def _run(token: CancelToken, words: list[str]) -> tuple[int, str]:
    """Run a program as long as a token lets it: its exit code, and the end of its complaints."""
    complaint = b""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", env={"LC_ALL": "C"}
    )
    with process:
        assert process.stderr is not None
        try:
            while True:
                token.check()
                if select.select([process.stderr], [], [], _LOOK_S)[0]:
                    piece = os.read(process.stderr.fileno(), 2**16)
                    if not piece:
                        break
                    complaint = (complaint + piece)[-_COMPLAINT:]
        except BaseException:
            process.kill()
            raise
    return process.returncode, complaint.decode(errors="replace")

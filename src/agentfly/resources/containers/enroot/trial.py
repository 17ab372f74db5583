"""What is tried before enroot is said to work: that it answers, and that namespaces can be made around it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentfly.errors import PrerequisiteError
from agentfly.resources.cleanup_record import DIRECTORY, CleanupRecord
from agentfly.resources.containers.bubblewrap.capabilities import user_namespace_cure
from agentfly.resources.containers.bubblewrap.scratch import runtime_directory, sandbox_uid
from agentfly.resources.containers.enroot.process import PROGRAM
from agentfly.resources.containers.enroot.program import environment
from agentfly.resources.tree_removal import remove_tree

_PATIENCE_S = 30.0
_LAYER = 2**20


def try_out(program: str) -> str:
    """Try an enroot; its version.

    Raises:
        PrerequisiteError: something does not work. The message says what, and what to do.
    """
    if shutil.which("unsquashfs") is None:
        raise PrerequisiteError("unsquashfs, with which enroot unpacks images, is missing: install squashfs-tools.")
    place = runtime_directory() / f".enroot-trial-{uuid.uuid4().hex[:12]}"
    with CleanupRecord("sandbox-trial", DIRECTORY, {"directory": str(place)}), _removed(place):
        place.mkdir(mode=0o700)
        for name in ("run", "data/box", "layer", "image"):
            (place / name).mkdir(parents=True)
        if os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, sandbox_uid(), sandbox_uid())
        given = environment(place, place / "data")
        try:
            asked = subprocess.run(
                [program, "version"], env=given, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PrerequisiteError(f"'{program} version' does not work: {error}. Install enroot anew.") from error
        if asked.returncode:
            raise PrerequisiteError(f"'{program} version' failed: {asked.stderr.strip()}. Install enroot anew.")
        _make_namespaces(place)
        return asked.stdout.strip()


@contextmanager
def _removed(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        remove_tree(place)


def _make_namespaces(place: Path) -> None:
    plan = {
        "place": str(place),
        "image": str(place / "image"),
        "uid": sandbox_uid(),
        "inside": 1000,
        "disk": _LAYER,
        "network": False,
        "groups": [],
        "limits": {},
        "mounts": [],
        "directories": [],
        "files": {},
        "first_lines": {},
    }
    with tempfile.TemporaryFile("w+") as file:
        json.dump(plan, file)
        file.seek(0)
        words = ["try", str(place), str(file.fileno())]
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(PROGRAM), *words],
            capture_output=True, text=True, timeout=_PATIENCE_S, check=False, pass_fds=[file.fileno()],
        )  # fmt: skip
    said = tried.stderr.strip()
    if tried.returncode and "lay it over" in said:
        raise PrerequisiteError(
            f"A private layer cannot be laid over an image: {said}. An ordinary user may do that from Linux 5.11 on."
        )
    if tried.returncode:
        raise PrerequisiteError(user_namespace_cure(said).replace("bubblewrap", "The layer around enroot"))

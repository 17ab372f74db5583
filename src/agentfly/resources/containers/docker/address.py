"""Where the service of a container engine listens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def docker_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """``DOCKER_HOST``, or the first of dockerd's usual sockets that is there; None if none is."""
    if host := environment.get("DOCKER_HOST"):
        return host
    return _first([Path("/var/run/docker.sock"), Path(environment.get("HOME", "/"), ".docker/run/docker.sock")])


def podman_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """``CONTAINER_HOST``, or the first of the usual sockets of ``podman system service`` that is there."""
    if host := environment.get("CONTAINER_HOST"):
        return host
    own = [Path(runtime, "podman/podman.sock")] if (runtime := environment.get("XDG_RUNTIME_DIR")) else []
    return _first([*own, Path("/run/podman/podman.sock")])


def _first(sockets: list[Path]) -> str | None:
    return next((f"unix://{path}" for path in sockets if _is_socket(path)), None)


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # in a directory that this user may not look into, such as the home of another
        return False

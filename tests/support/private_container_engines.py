"""Private container engines for tests and benchmarks: a dockerd and a podman service.

They share nothing with the engines of the machine. Sockets, images and containers are in a temporary directory.
They need root, and the Debian packages ``docker.io`` and ``podman`` with ``runc``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agentfly.core.errors import PrerequisiteError

_PATIENCE_S = 60.0
_END_PATIENCE_S = 5.0  # its data is discarded anyway
_FILES = "4096:4096"
_CONTAINERS_CONF = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
_STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{directory}/root"
runroot = "{directory}/run"
"""


@contextlib.contextmanager
def private_dockerd() -> Iterator[str]:
    """Run a dockerd without networks. Yield its address.

    Raises:
        PrerequisiteError: a program is missing, or the service does not start.
    """
    _need("dockerd", "containerd", "runc", package="docker.io")
    with _directory() as directory:
        socket = directory / "docker.sock"
        command = ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", f"--host=unix://{socket}"]
        command += [f"--data-root={directory / 'data'}", f"--exec-root={directory / 'exec'}"]
        command += [f"--pidfile={directory / 'pid'}", f"--default-ulimit=nofile={_FILES}"]
        with _running(command, directory, socket, {}):
            yield f"unix://{socket}"


@contextlib.contextmanager
def private_podman() -> Iterator[str]:
    """Run a podman service. Yield its address.

    Raises:
        PrerequisiteError: a program is missing, or the service does not start.
    """
    _need("podman", "conmon", "runc", package="podman runc")
    with _directory() as directory:
        socket = directory / "podman.sock"
        (directory / "containers.conf").write_text(_CONTAINERS_CONF)
        (directory / "storage.conf").write_text(_STORAGE_CONF.format(directory=directory))
        settings = {
            "CONTAINERS_CONF": str(directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(directory / "storage.conf"),
        }
        command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
        with _running(command, directory, socket, settings):
            try:
                yield f"unix://{socket}"
            finally:
                subprocess.run(
                    ["podman", "rm", "--all", "--force", "--time=0"],
                    env={**os.environ, **settings},
                    capture_output=True,
                    timeout=_PATIENCE_S,
                    check=False,
                )


PRIVATE_ENGINES: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "docker": private_dockerd,
    "podman": private_podman,
}
"""Context managers of private engines, by the name of their backend."""


def import_image(address: str, archive: Path, name: str) -> None:
    """Import an archive of a root file system as an image.

    Args:
        address: the address of the engine.
        archive: a tar file.
        name: the name of the image.

    Raises:
        PrerequisiteError: the engine rejects the archive.
    """
    url = f"http://engine/v1.40/images/create?fromSrc=-&repo={name}"
    socket = address.removeprefix("unix://")
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--unix-socket", socket]
    done = subprocess.run(
        [*command, "--request", "POST", "--upload-file", str(archive), url], capture_output=True, text=True, check=False
    )
    if done.returncode or '"error"' in done.stdout:
        raise PrerequisiteError(f"{address} rejects {archive} as an image: {done.stdout} {done.stderr}")


def _need(*programs: str, package: str) -> None:
    if os.getuid() != 0:
        raise PrerequisiteError("A private container engine needs root. Run as root, for instance with sudo.")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise PrerequisiteError(f"{', '.join(missing)} is not installed: apt install {package}")


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="agentfly-engine-"))
    try:
        yield directory
    finally:
        _end_processes_of(directory)
        _unmount_below(directory)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _running(command: list[str], directory: Path, socket: Path, settings: dict[str, str]) -> Iterator[None]:
    """Run a service for a block. Its socket exists when the block starts."""
    log = directory / "log"
    with log.open("wb") as file:
        service = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=directory,  # some engines write files there, for example after an out-of-memory kill
        )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not socket.is_socket():
            if service.poll() is not None or time.monotonic() > deadline:
                raise PrerequisiteError(f"{command[0]} does not start here:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        service.terminate()
        try:
            service.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def _end_processes_of(directory: Path) -> None:
    """Kill processes that have the directory in their command line: container monitors that the engine left."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(directory) in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


def _unmount_below(directory: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{directory}/"):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)

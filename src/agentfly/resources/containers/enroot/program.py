"""The program enroot: where it is, its environment, and its runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from agentfly.core.errors import ResourceStartError
from agentfly.resources.containers.runtime_directory import sandbox_uid

NAME = "enroot"
_REASON = 2000
_LONGEST_OUTPUT = 2**16  # bytes kept of what a program prints, which may name each file of an image
# For fetching images alone: what reaches a registry from here, and as whom.
_FOR_FETCHING = ("HOME", "XDG_CONFIG_HOME", "ENROOT_CONFIG_PATH", "SSL_CERT_DIR", "SSL_CERT_FILE")
_PROXIES = ("all_proxy", "no_proxy", "http_proxy", "https_proxy")


def find_enroot() -> str | None:
    """The path of enroot; None if there is none."""
    return shutil.which(NAME)


def enroot_environment(place: Path, data: Path) -> dict[str, str]:
    """Return enroot's environment: directories below one of ours, and none of its extras.

    Its configuration directories hold only what a sandbox needs. So the machine's mounts and hooks (home directories,
    ``/dev``, control groups) and the user's do not get into a sandbox.

    Args:
        place: the directory for temporary files while it runs.
        data: the directory of its containers.
    """
    return {
        **_programs(),
        "HOME": str(place),
        "ENROOT_RUNTIME_PATH": str(place / "run"),
        "ENROOT_CONFIG_PATH": str(place / "config"),
        "ENROOT_SYSCONF_PATH": str(place / "system"),
        "ENROOT_CACHE_PATH": str(place / "cache"),
        "ENROOT_TEMP_PATH": str(place / "run"),
        "ENROOT_DATA_PATH": str(data),
        # Those that the machine's configuration file may have switched on. The namespaces are made around it.
        "ENROOT_LOGIN_SHELL": "no",
        "ENROOT_REMAP_ROOT": "no",
        "ENROOT_ALLOW_SUPERUSER": "no",
        "ENROOT_MOUNT_HOME": "no",
        "ENROOT_RESTRICT_DEV": "no",
        "ENROOT_UNSHARE_NET": "no",
        "ENROOT_UNSHARE_PID": "no",
        "ENROOT_UNSHARE_UTS": "no",
    }


def import_environment() -> dict[str, str]:
    """Return enroot's environment for fetching an image, with the user's credentials."""
    names = (*_FOR_FETCHING, *_PROXIES, *(name.upper() for name in _PROXIES))
    return {**_programs(), **{name: os.environ[name] for name in names if name in os.environ}}


async def run_program(
    words: list[str],
    given: Mapping[str, str],
    *,
    as_user: bool = True,
    take: Callable[[bytes], None] = lambda printed: None,
) -> str:
    """Run a program to its end; what it printed at last.

    Args:
        words: its command line.
        given: its environment.
        as_user: whether as the user of sandboxes, where this is root.
        take: called with all that it prints. If it raises, the program is killed.

    Raises:
        ResourceStartError: it failed; the message has its words.
    """
    user = sandbox_uid() if as_user and os.geteuid() == 0 else None
    # a pipe of our own: with one of asyncio's, the wait for the process is one for its output too, which nobody reads
    source, sink = os.pipe2(os.O_CLOEXEC)
    printed = asyncio.StreamReader(2**16)
    reading = None
    try:
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(printed),
            open(source, "rb", buffering=0),  # noqa: ASYNC230, PTH123, SIM115 - it is closed with its transport
        )
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(given),
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except BaseException:
        if reading is not None:
            reading.close()
        raise
    finally:
        os.close(sink)
    try:
        output = b""
        while piece := await printed.read(2**16):
            take(piece)
            output = (output + piece)[-_LONGEST_OUTPUT:]
        await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that it has started: the group is its own
        await process.wait()
        raise
    finally:
        reading.close()
    said = output.decode(errors="replace").strip()
    if process.returncode:
        raise ResourceStartError(f"'{' '.join(words)}' failed with exit code {process.returncode}: {said[-_REASON:]}")
    return said


def _programs() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}

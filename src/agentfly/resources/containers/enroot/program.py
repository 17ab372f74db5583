"""The program enroot: its environment, its runs, and ProcessStream, a local process as the stream of a sandbox's
program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.core.errors import ResourceStartError
from agentfly.resources.containers.runtime_directory import sandbox_uid
from agentfly.resources.containers.stream_shell.stream import Stream

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


_CHUNK = 65536
_PIECES = 16  # read ahead
_GRACE_S = 0.5  # for what a process has printed before its end
PROGRAM = Path(__file__).with_name("namespaces.py")


class ProcessStream(Stream):
    """A process, its input and its two outputs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Wrap a process whose input and outputs are pipes."""
        self.process = process
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_PIECES)
        self._over = False
        self._reading = asyncio.create_task(self._read_both())

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        if self._over:
            return None
        piece = await self._pieces.get()
        self._over = piece is None
        return piece

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        assert self.process.stdin is not None
        if self.process.returncode is not None or self.process.stdin.is_closing():
            raise BrokenPipeError("the program has ended")
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def end_input(self) -> None:
        """See `Stream.end_input`."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def close(self) -> None:
        """See `Stream.close`. The program gets end-of-file on its input. Only the sandbox's end is sure to end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.exited()
        self.process._transport.close()  # type: ignore[attr-defined]

    async def exited(self) -> int:
        """Wait until the process has ended, and return its exit code.

        The `wait` of asyncio returns only at the end of the outputs. That may never come if other processes hold them
        open, or if nobody reads them.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
            descriptor = os.pidfd_open(self.process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while (code := self.process.returncode) is None:  # noqa: ASYNC110 - asyncio tells nobody that it has waited
            await asyncio.sleep(0.005)
        return code

    async def _read_both(self) -> None:
        """Read until both outputs are at their end, or the process is, though others may have them open."""
        readers = [asyncio.create_task(self._read_one(number)) for number in (1, 2)]
        ended = asyncio.create_task(self.exited())
        try:
            while not all(reader.done() for reader in readers):
                await asyncio.wait([*readers, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await asyncio.wait(readers, timeout=_GRACE_S)
                    break
            await self._pieces.put(None)
        finally:
            for task in (*readers, ended):
                task.cancel()

    async def _read_one(self, number: int) -> None:
        source = self.process.stdout if number == 1 else self.process.stderr
        assert source is not None
        while data := await source.read(_CHUNK):
            await self._pieces.put((number, data))


async def run_namespaces_program(
    verb: str, place: Path, plan: Mapping[str, Any], environment: Mapping[str, str], passed: Sequence[int] = ()
) -> ProcessStream:
    """Run the program `run_namespaces_program` with a plan.

    Args:
        verb: what it is to do.
        place: the directory of the sandbox, by which the process is known.
        plan: what it needs to know. It is in none of the process's words, which all users of the host may read.
        environment: the environment of that program alone.
        passed: open files that it is to have, named in its words.
    """
    descriptor = _written(plan)
    try:
        words = [verb, str(place), str(descriptor), *map(str, passed)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(PROGRAM), *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            pass_fds=(descriptor, *passed),
            start_new_session=True,
            limit=_CHUNK,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    return ProcessStream(process)


def _written(plan: Mapping[str, Any]) -> int:
    """A file in memory with a plan, open at its beginning."""
    descriptor = os.memfd_create("plan")
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        json.dump(plan, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor

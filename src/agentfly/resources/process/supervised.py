"""SupervisedProgram: this process's side of a program and its supervisor, and the removal of orphaned programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.core.errors import ResourceError
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.process.child import (
    RESOURCE_TRACKER_GRACE_S,
    describe_exit,
    is_resource_tracker,
    python_command,
)
from agentfly.resources.process.procfs import start_time
from agentfly.resources.process.supervisor import DIRECTORY_VARIABLE, ProgramSpec

logger = logging.getLogger(__name__)

FORCE_S = 5.0
"""Seconds that a keeper may take, beyond the grace, to end everything below it before it is killed itself."""


class SupervisedProgram:
    """A program's process, and everything below it, whose end is noticed and told."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
        self._life: asyncio.StreamWriter | None = None
        self._last_words: asyncio.Task[bytes] | None = None
        self.traces: dict[str, Any] = {}

    async def start(self, job: ProgramSpec) -> None:
        """Start the keeper and, by it, the program."""
        near, far = socket.socketpair()
        with far:
            words, self._life = await asyncio.open_connection(sock=near)
            self._keeper = _spawn(job, far)
        self._last_words = asyncio.create_task(words.read())
        self.traces = {"pid": self._keeper.pid, "start_time": start_time(self._keeper.pid)}
        self._life.write(job.to_json_line())
        await self._life.drain()

    @property
    def ended(self) -> bool:
        """Whether the program has ended, with everything that it had started."""
        return self._last_words is None or self._last_words.done()

    async def wait_exit(self) -> str:
        """Wait for the end of the program and of all that it had started; how it ended, in words."""
        assert self._last_words is not None
        try:
            words = json.loads(await asyncio.shield(self._last_words))
        except (OSError, ValueError):
            return "nothing tells how it ended"
        if "failed" in words:
            return f"it could not be run: {words['failed']}"
        return "it was told to end" if words["exit"] is None else describe_exit(words["exit"])

    def kill(self) -> None:
        """Have the program killed with everything below it; `wait` tells when that is done."""
        if self._life is not None:
            with contextlib.suppress(OSError):
                self._life.write_eof()

    async def stop(self, grace_s: float) -> None:
        """Ask the program to end, and kill it with everything below it after the grace; return when all are gone."""
        if self._life is not None and self._last_words is not None and self._keeper is not None:
            await self._end(self._keeper, self._life, self._last_words, grace_s)
        if self._life is not None:
            self._life.close()

    async def _end(
        self, keeper: subprocess.Popen[bytes], life: asyncio.StreamWriter, words: asyncio.Task[bytes], grace_s: float
    ) -> None:
        if grace_s > 0 and not words.done():
            with contextlib.suppress(OSError):
                life.write(f"{grace_s:.3f}\n".encode())
        else:
            self.kill()
        done, _ = await asyncio.wait({words}, timeout=grace_s + FORCE_S)
        if not done:
            logger.warning("The keeper %d of a program does not end and is killed.", keeper.pid)
            keeper.kill()
        while keeper.poll() is None:  # noqa: ASYNC110  (its sockets close an instant before it can be reaped)
            await asyncio.sleep(0.001)
        words.cancel()


def _spawn(job: ProgramSpec, life: socket.socket) -> subprocess.Popen[bytes]:
    with Path(job.log).open("ab") as errors:
        return subprocess.Popen(
            python_command("agentfly.resources.process.supervisor:run_program", life.fileno(), os.getpid()),
            cwd=job.directory,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(life.fileno(), *job.descriptors),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )


_PATIENCE_S = 10.0


def reap(traces: Mapping[str, Any]) -> None:
    """End a keeper and all processes of its program, and remove their directory. Fine if they are gone already.

    A keeper ends by itself within a second of its process's death, with all that is below it. Should it have been
    killed itself, what the program had started is known by the directory, which is its alone.

    Raises:
        ResourceError: a process does not end.
        OSError: the directory cannot be removed.
    """
    directory = Path(traces["directory"])
    grave = directory.with_name(f"{directory.name}.reaped")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(grave)  # so that nothing can be started there any more
    began = time.monotonic()
    while left := _remaining_processes(traces, (directory, grave)):
        waited = time.monotonic() - began
        if waited > _PATIENCE_S:
            raise ResourceError(f"The processes {left} of a kept program do not end, not even by SIGKILL.")
        for pid in left:
            if waited > RESOURCE_TRACKER_GRACE_S or not is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    remove_tree(grave)


def _remaining_processes(traces: Mapping[str, Any], directories: Sequence[Path]) -> list[int]:
    left = [pid for directory in directories for pid in processes_of_directory(directory)]
    pid = traces.get("pid")
    if pid is not None and start_time(pid) == traces["start_time"]:
        left.append(pid)
    return left


def processes_of_directory(directory: Path) -> list[int]:
    """The processes that run in this directory, or belong to it by their environment; zombies are none."""
    mark = f"{DIRECTORY_VARIABLE}={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == directory or mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found

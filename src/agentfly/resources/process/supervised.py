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

KILL_TIMEOUT_S = 5.0
"""Seconds beyond the grace period that a supervisor has to kill all its descendants before it is killed itself."""


class SupervisedProgram:
    """A program with all its descendants, run under a supervisor process."""

    def __init__(self) -> None:
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._exit_report: asyncio.Task[bytes] | None = None
        self.traces: dict[str, Any] = {}

    async def start(self, spec: ProgramSpec) -> None:
        """Start the supervisor, which starts the program."""
        near, far = socket.socketpair()
        with far:
            reader, self._control = await asyncio.open_connection(sock=near)
            self._supervisor = _spawn(spec, far)
        self._exit_report = asyncio.create_task(reader.read())
        self.traces = {"pid": self._supervisor.pid, "start_time": start_time(self._supervisor.pid)}
        self._control.write(spec.to_json_line())
        await self._control.drain()

    @property
    def ended(self) -> bool:
        """Whether the program and all its descendants have ended."""
        return self._exit_report is None or self._exit_report.done()

    async def wait_exit(self) -> str:
        """Wait for the end of the program and all its descendants. Returns a description of how it ended."""
        assert self._exit_report is not None
        try:
            report = json.loads(await asyncio.shield(self._exit_report))
        except (OSError, ValueError):
            return "nothing tells how it ended"
        if "failed" in report:
            return f"it could not be run: {report['failed']}"
        return "it was told to end" if report["exit"] is None else describe_exit(report["exit"])

    def kill(self) -> None:
        """Kill the program and all its descendants; `wait_exit` returns when that is done."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.write_eof()

    async def stop(self, grace_s: float) -> None:
        """Ask the program to end; after the grace period kill it and all its descendants. Returns when all are gone."""
        if self._control is not None and self._exit_report is not None and self._supervisor is not None:
            await self._end(self._supervisor, self._control, self._exit_report, grace_s)
        if self._control is not None:
            self._control.close()

    async def _end(
        self,
        supervisor: subprocess.Popen[bytes],
        control: asyncio.StreamWriter,
        report: asyncio.Task[bytes],
        grace_s: float,
    ) -> None:
        if grace_s > 0 and not report.done():
            with contextlib.suppress(OSError):
                control.write(f"{grace_s:.3f}\n".encode())
        else:
            self.kill()
        done, _ = await asyncio.wait({report}, timeout=grace_s + KILL_TIMEOUT_S)
        if not done:
            logger.warning("The supervisor %d of a program does not end and is killed.", supervisor.pid)
            supervisor.kill()
        while supervisor.poll() is None:  # noqa: ASYNC110  (its sockets close an instant before it can be reaped)
            await asyncio.sleep(0.001)
        report.cancel()


def _spawn(spec: ProgramSpec, control: socket.socket) -> subprocess.Popen[bytes]:
    with Path(spec.log).open("ab") as errors:
        return subprocess.Popen(
            python_command("agentfly.resources.process.supervisor:run_program", control.fileno(), os.getpid()),
            cwd=spec.directory,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(control.fileno(), *spec.descriptors),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )


_REAP_TIMEOUT_S = 10.0


def reap(traces: Mapping[str, Any]) -> None:
    """Kill a supervisor and all processes of its program, and remove their directory. Does nothing if they are gone.

    A supervisor ends with all its descendants within a second of its owner's death. If the supervisor itself was
    killed, the processes of the program are found by the directory, which only they use.

    Raises:
        ResourceError: a process does not end.
        OSError: the directory cannot be removed.
    """
    directory = Path(traces["directory"])
    renamed = directory.with_name(f"{directory.name}.reaped")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(renamed)  # so that no process can be started there any more
    began = time.monotonic()
    while left := _remaining_processes(traces, (directory, renamed)):
        waited = time.monotonic() - began
        if waited > _REAP_TIMEOUT_S:
            raise ResourceError(f"The processes {left} of a supervised program do not end, not even by SIGKILL.")
        for pid in left:
            if waited > RESOURCE_TRACKER_GRACE_S or not is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    remove_tree(renamed)


def _remaining_processes(traces: Mapping[str, Any], directories: Sequence[Path]) -> list[int]:
    left = [pid for directory in directories for pid in processes_of_directory(directory)]
    pid = traces.get("pid")
    if pid is not None and start_time(pid) == traces["start_time"]:
        left.append(pid)
    return left


def processes_of_directory(directory: Path) -> list[int]:
    """Ids of the processes that run in this directory or have it in their environment; zombies do not count."""
    mark = f"{DIRECTORY_VARIABLE}={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == directory or mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found

"""The owner's side of a supervisor, a program under a supervisor, and the removal of orphaned programs."""

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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SupervisorProcess:
    """A running supervisor.

    Args:
        pid: its process id.
        started: its start time.
        child: its handle as a child of this process; None if it is a child of a fork server.
    """

    pid: int
    started: int | None
    child: subprocess.Popen[bytes] | None = None

    @property
    def traces(self) -> dict[str, Any]:
        """The ids by which a later process finds it."""
        return {"pid": self.pid, "start_time": self.started}

    def gone(self) -> bool:
        """Whether it has ended."""
        if self.child is not None:
            return self.child.poll() is not None
        return self.started is None or start_time(self.pid) != self.started

    def kill(self) -> None:
        """Kill it. The kernel then kills its direct child."""
        if not self.gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait_gone(self, report: asyncio.Task[bytes], within_s: float) -> None:
        """Wait for its exit report and its end. Kill it if it does not report within the time."""
        done, _ = await asyncio.wait({report}, timeout=within_s)
        if not done:
            logger.warning("The supervisor %d does not end and is killed.", self.pid)
            self.kill()
        while not self.gone():  # noqa: ASYNC110  (its sockets close an instant before it is gone)
            await asyncio.sleep(0.001)


class SupervisedProgram:
    """A program with all its descendants, run under a supervisor process."""

    def __init__(self) -> None:
        self._supervisor: SupervisorProcess | None = None
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
        self.traces = self._supervisor.traces
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
            return "the cause is unknown"
        if "failed" in report:
            return f"it could not be run: {report['failed']}"
        return "it was asked to end" if report["exit"] is None else describe_exit(report["exit"])

    def kill(self) -> None:
        """Kill the program and all its descendants; `wait_exit` returns when that is done."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.write_eof()

    async def stop(self, grace_s: float) -> None:
        """Ask the program to end; after the grace period kill it and all its descendants. Returns when all are gone."""
        if self._control is not None and self._exit_report is not None and self._supervisor is not None:
            if grace_s > 0 and not self._exit_report.done():
                with contextlib.suppress(OSError):
                    self._control.write(f"{grace_s:.3f}\n".encode())
            else:
                self.kill()
            await self._supervisor.wait_gone(self._exit_report, grace_s + KILL_TIMEOUT_S)
            self._exit_report.cancel()
        if self._control is not None:
            self._control.close()


def _spawn(spec: ProgramSpec, control: socket.socket) -> SupervisorProcess:
    with Path(spec.log).open("ab") as errors:
        child = subprocess.Popen(
            python_command("agentfly.resources.process.supervisor:run_program", control.fileno(), os.getpid()),
            cwd=spec.directory,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=(control.fileno(), *spec.descriptors),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )
    return SupervisorProcess(child.pid, start_time(child.pid), child)


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
        directory.rename(renamed)  # so that no process can start there any more
    began = time.monotonic()
    while left := _remaining_processes(traces, (directory, renamed)):
        waited = time.monotonic() - began
        if waited > _REAP_TIMEOUT_S:
            raise ResourceError(f"The processes {left} of a supervised program do not end, even after SIGKILL.")
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

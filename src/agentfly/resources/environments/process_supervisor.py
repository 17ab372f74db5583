"""The supervisor of a simulator's process: a small process that leaves nothing behind.

It forks the simulator's process (`worker`) and runs no user code, so it cannot hang with it. It is a subreaper:
descendants of the simulator become its children when their parents end, even if they have left the group or session.
It kills all of them and exits when the simulator's process ends, when the memory limit is exceeded, when it is told to
stop, or when the owner process is gone.

It holds one end of the control socket. End-of-file on it means: stop now. Before it exits, the supervisor writes an
`ExitInfo` in JSON. If the owner sends one byte before closing the socket, the owner removes the simulator's directory.
Otherwise the supervisor removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from typing import NoReturn

from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.worker import serve_requests
from agentfly.resources.process.cgroups import MemoryLimit
from agentfly.resources.process.child import (
    ChildWatch,
    become_subreaper,
    kill_descendants,
    set_parent_death_signal,
)
from agentfly.resources.process.procfs import start_time

OWNER_POLL_S = 1.0
"""Seconds between two checks that the owner process is alive. The control socket shows its end at once, unless a fork
of the owner holds the socket open."""


@dataclass(frozen=True)
class SupervisorConfig:
    """The configuration of a supervisor.

    Args:
        calls: descriptor of the socket for calls.
        control: descriptor of the control socket.
        owner: id and start time of the process that owns the simulator.
        memory_limit: the memory limit of the simulator's processes, if any.
        directory: the directory to remove at the end if the owner is gone.
    """

    calls: int
    control: int
    owner: tuple[int, int | None]
    memory_limit: MemoryLimit | None
    directory: str

    @classmethod
    def from_json(cls, text: str) -> SupervisorConfig:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        memory_limit = fields["memory_limit"] and MemoryLimit(**fields["memory_limit"])
        return cls(**{**fields, "owner": tuple(fields["owner"]), "memory_limit": memory_limit})

    def to_json(self) -> str:
        """The configuration as text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ExitInfo:
    """The end of a simulator's process.

    Args:
        exit: its exit status, negative for a signal number; None if the supervisor killed it.
        out_of_memory: whether it or one of its descendants exceeded the memory limit.
    """

    exit: int | None
    out_of_memory: bool

    @classmethod
    def from_json(cls, text: bytes | str) -> ExitInfo:
        """Parse the exit report of a supervisor.

        Raises:
            ValueError: the text is no exit report.
        """
        match json.loads(text):
            case {"exit": int() | None as exit, "out_of_memory": bool() as out_of_memory}:
                return cls(exit, out_of_memory)
        raise ValueError("this is no exit report of a supervisor")


def main(config: str) -> NoReturn:
    """Run a supervisor in its own interpreter, with its configuration as text."""
    supervise(SupervisorConfig.from_json(config))


def supervise(config: SupervisorConfig) -> NoReturn:
    """Supervise one simulator's process from start to end."""
    become_subreaper()
    for descriptor in (config.calls, config.control):
        os.set_inheritable(descriptor, False)  # descendants of the simulator must not inherit them
    supervisor = os.getpid()
    if config.memory_limit is not None:
        config.memory_limit.create()
    worker = os.fork()
    if worker == 0:
        _run_worker(supervisor, config)
    os.close(config.calls)
    with socket.socket(fileno=config.control) as control:
        exit_info = _watch(worker, control, config)
        kill_descendants()
        if _owner_is_gone(control, config):
            with contextlib.suppress(OSError):
                remove_tree(config.directory)
        if config.memory_limit is not None:
            with contextlib.suppress(OSError):  # the owner removes it too
                config.memory_limit.remove()
        if exit_info is not None:
            with contextlib.suppress(OSError):
                control.sendall(json.dumps(asdict(exit_info)).encode())
    os._exit(0)  # no interpreter shutdown is needed, and the owner waits for this exit


def _run_worker(supervisor: int, config: SupervisorConfig) -> NoReturn:
    """Run the simulator's process, and exit with it."""
    code = 1
    try:
        set_parent_death_signal()
        if os.getppid() != supervisor:
            os._exit(code)
        os.setpgid(0, 0)  # simulators signal their whole group to end their children
        os.close(config.control)
        with socket.socket(fileno=config.calls) as calls:
            serve_requests(calls, config.memory_limit)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)


def _owner_is_gone(control: socket.socket, config: SupervisorConfig) -> bool:
    """Whether the owner cannot remove the directory itself."""
    owner, owner_started = config.owner
    if start_time(owner) != owner_started:
        return True
    try:
        return control.recv(1, socket.MSG_DONTWAIT) == b""
    except OSError:  # no byte and no end-of-file: the owner lives
        return False


def _watch(worker: int, control: socket.socket, config: SupervisorConfig) -> ExitInfo | None:
    """Wait until the process ends or exceeds its memory limit; None if it must stop for another reason."""
    owner, owner_started = config.owner
    memory_limit = config.memory_limit
    watch = ChildWatch(worker, lambda: start_time(owner) == owner_started)
    interval_s = OWNER_POLL_S if memory_limit is None else memory_limit.poll_interval_s
    while (readable := watch.wait([control.fileno()], interval_s)) is not None:
        if readable:
            return None
        if memory_limit is not None and memory_limit.exceeded():
            return ExitInfo(None, True)
    if watch.status is None:
        return None
    return ExitInfo(watch.status, memory_limit is not None and memory_limit.oom_kills() > 0)

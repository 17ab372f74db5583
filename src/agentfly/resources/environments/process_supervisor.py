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
import select
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import NoReturn

from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.worker import serve_requests
from agentfly.resources.process.child import (
    become_subreaper,
    child_wakeup_fd,
    kill_descendants,
    reap_child,
    set_parent_death_signal,
)
from agentfly.resources.process.memory_limit import MemoryLimit
from agentfly.resources.process.procfs import start_time

OWNER_POLL_S = 1.0
"""Seconds between two looks at the process that the simulator belongs to. The life line shows its end at once, unless
a fork of it holds that open."""


@dataclass(frozen=True)
class SupervisorConfig:
    """What a keeper is told.

    Args:
        calls: descriptor of the socket that calls come through.
        life: descriptor of the life line.
        owner: id and start time of the process that the simulator belongs to.
        bound: the limit on the memory of the simulator's processes, if there is one.
        directory: what is to be removed in the end, should the process that the simulator belongs to be gone.
    """

    calls: int
    life: int
    owner: tuple[int, int | None]
    bound: MemoryLimit | None
    directory: str

    @classmethod
    def from_json(cls, text: str) -> SupervisorConfig:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        bound = fields["bound"] and MemoryLimit(**fields["bound"])
        return cls(**{**fields, "owner": tuple(fields["owner"]), "bound": bound})

    def to_json(self) -> str:
        """The charge as text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ExitInfo:
    """How a simulator's process ended.

    Args:
        exit: its exit status, negative for the number of a signal; None if the keeper ended it.
        out_of_memory: whether it, or something that it started, ran into the limit of memory.
    """

    exit: int | None
    out_of_memory: bool

    @classmethod
    def from_json(cls, text: bytes | str) -> ExitInfo:
        """The obituary that a keeper wrote.

        Raises:
            ValueError: it is none.
        """
        match json.loads(text):
            case {"exit": int() | None as exit, "out_of_memory": bool() as out_of_memory}:
                return cls(exit, out_of_memory)
        raise ValueError("a keeper says how its process ended")


def main(charge: str) -> NoReturn:
    """Be a keeper in an interpreter of its own, with a charge as text."""
    supervise(SupervisorConfig.from_json(charge))


def supervise(charge: SupervisorConfig) -> NoReturn:
    """Keep one simulator's process, from its start to its end."""
    become_subreaper()
    for descriptor in (charge.calls, charge.life):
        os.set_inheritable(descriptor, False)  # they are not for what the simulator starts
    keeper = os.getpid()
    if charge.bound is not None:
        charge.bound.create()
    worker = os.fork()
    if worker == 0:
        _run_worker(keeper, charge)
    os.close(charge.calls)
    with socket.socket(fileno=charge.life) as life:
        obituary = _watch(worker, life, charge)
        kill_descendants()
        if _owner_is_gone(life, charge):
            with contextlib.suppress(OSError):
                remove_tree(charge.directory)
        if charge.bound is not None:
            with contextlib.suppress(OSError):  # whoever gave the charge clears it too
                charge.bound.remove()
        if obituary is not None:
            with contextlib.suppress(OSError):
                life.sendall(json.dumps(asdict(obituary)).encode())
    os._exit(0)  # there is nothing to tidy, and whoever waits for the end waits for this


def _run_worker(keeper: int, charge: SupervisorConfig) -> NoReturn:
    """Be the simulator's process, and end with it."""
    code = 1
    try:
        set_parent_death_signal()
        if os.getppid() != keeper:
            os._exit(code)
        os.setpgid(0, 0)  # so that it can signal its whole group, which simulators do to end what they started
        os.close(charge.life)
        with socket.socket(fileno=charge.calls) as calls:
            serve_requests(calls, charge.bound)
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


def _owner_is_gone(life: socket.socket, charge: SupervisorConfig) -> bool:
    """Whether nobody is there to tidy up."""
    owner, owner_started = charge.owner
    if start_time(owner) != owner_started:
        return True
    try:
        return life.recv(1, socket.MSG_DONTWAIT) == b""
    except OSError:  # nothing was said: it lives
        return False


def _watch(worker: int, life: socket.socket, charge: SupervisorConfig) -> ExitInfo | None:
    """Wait until the simulator's process ends, or runs into its bound, or is to end: None."""
    woken = child_wakeup_fd()
    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    owner, owner_started = charge.owner
    bound = charge.bound
    while not told_to_end and start_time(owner) == owner_started:
        while (ended := reap_child()) is not None:
            pid, status = ended
            if pid == worker:
                return ExitInfo(status, bound is not None and bound.oom_kills() > 0)
        if bound is not None and bound.exceeded():
            return ExitInfo(None, True)
        readable, _, _ = select.select([life.fileno(), woken], [], [], bound.poll_interval_s if bound else OWNER_POLL_S)
        if life.fileno() in readable:
            return None
        if woken in readable:
            os.read(woken, 4096)
    return None

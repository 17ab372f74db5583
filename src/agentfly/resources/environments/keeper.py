"""The keeper: the small process between this one and a simulator's, which leaves nothing behind.

It forks the process that the simulator lives in (`worker`), runs none of its code itself, and so can never hang with
it. Whatever the simulator starts, also what leaves its group or session, comes to the keeper when its parent ends.
When the simulator's process ends, when the keeper is told to end, or when the process that started the keeper is
gone, however it went, the keeper kills all of it and ends.

The keeper holds one end of the life line, a socket: end-of-file on it says that the keeper must end, and what the
keeper writes into it (the exit status of the simulator's process, in JSON) says why it did.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from agentfly.resources.environments.worker import serve

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(calls_fd: int, life_fd: int, parent: int, memory_bytes: int) -> None:
    """Keep one simulator's process.

    Args:
        calls_fd: descriptor of the socket that calls come through.
        life_fd: descriptor of the life line.
        parent: id of the process that the simulator belongs to.
        memory_bytes: limit on the address space of the simulator's processes; 0 means none.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        _work(keeper, calls_fd, life_fd, memory_bytes)
    os.close(calls_fd)
    with socket.socket(fileno=life_fd) as life:
        status = _watch(worker, life, parent)
        _end_descendants()
        if status is not None:
            with contextlib.suppress(OSError):
                life.sendall(json.dumps({"exit": status}).encode())
    os._exit(0)  # there is nothing to tidy, and whoever waits for the end waits for this


def _work(keeper: int, calls_fd: int, life_fd: int, memory_bytes: int) -> None:
    """Be the simulator's process, and end with it."""
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            return
        os.close(life_fd)
        with socket.socket(fileno=calls_fd) as calls:
            serve(calls, memory_bytes)
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


def _watch(worker: int, life: socket.socket, parent: int) -> int | None:
    """Wait until the simulator's process ends, and give its exit status, or until it is to end: None."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    told_to_end = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    signal.set_wakeup_fd(wakes)
    while not told_to_end and os.getppid() == parent:
        while (ended := _reap_one()) is not None:
            pid, status = ended
            if pid == worker:
                return status
        # The life line may be held open by a fork of the dead parent, hence the look at the parent every second.
        readable, _, _ = select.select([life.fileno(), woken], [], [], 1.0)
        if life.fileno() in readable:
            return None
        if woken in readable:
            os.read(woken, 4096)
    return None


def _reap_one() -> tuple[int, int] | None:
    """The id and exit status of a child that has ended; a signal's number is negative."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _end_descendants() -> None:
    """Kill everything below the keeper: as each process ends, its children become the keeper's and are next."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Ids of the keeper's children."""
    me = str(os.getpid())
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may hold anything; what follows it is well formed.
                if (folder / "stat").read_text().rpartition(")")[2].split()[1] == me:
                    children.append(int(folder.name))
    return children


def _prctl(option: int, value: int) -> None:
    """Set a property of this process that Python has no call for (Linux, prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")

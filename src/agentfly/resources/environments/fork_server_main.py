"""The fork server's program: imports what a simulator needs, and forks supervisors of simulators on request.

It has one thread, no event loop and no simulator. A forked process has the imports and nothing of other instances.
An import may start threads or processes or open files, which a fork would break or share. The fork server then reports
this and exits, and each instance imports for itself.

Requests arrive on a message socket: a `SupervisorConfig` without descriptors, together with the descriptors (calls,
control, output). The reply is the supervisor's id and start time, in JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments import process_supervisor, simulator
from agentfly.resources.environments.pickling import loads
from agentfly.resources.environments.process_supervisor import SupervisorConfig
from agentfly.resources.process.child import become_subreaper, child_wakeup_pipe, kill_descendants, reap_child
from agentfly.resources.process.procfs import children, start_time

MESSAGE_BYTES = 1 << 16
"""The longest request."""

_HARMLESS = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"}


def main(control_fd: int, factory_fd: int, owner: int, owner_started: int, directory: str) -> NoReturn:
    """Import, report what prevents forking, and fork on request until the owner is gone.

    Args:
        control_fd: descriptor of the socket for requests.
        factory_fd: descriptor of a file with the pickled factory.
        owner: id of the owner process.
        owner_started: its start time.
        directory: a directory of this process, removed at the end.
    """
    become_subreaper()
    with open(factory_fd, "rb") as file:
        pickled = file.read()
    obstacle = _start(pickled)
    with socket.socket(fileno=control_fd) as control:
        control.sendall(json.dumps({"obstacle": obstacle}).encode())
        if obstacle is None:
            gc.freeze()  # so that garbage collection in a fork does not copy shared pages
            _fork_on_request(control, owner, owner_started)
    if obstacle is not None:
        kill_descendants()  # processes that the import started
    with contextlib.suppress(OSError):  # the owner removes it too
        remove_tree(directory)
    os._exit(0)  # remaining supervisors end with their owner


def _start(pickled: bytes) -> str | None:
    """Import what the factory needs. Returns what the imports did that prevents forking, or None.

    A failing import fails in the simulator's process as well, and is reported there.
    """
    before = _open_files()
    with contextlib.suppress(Exception, SystemExit):
        (factory,) = loads(pickled)
        if isinstance(factory, str):
            simulator.named(factory)
    if opened := [path for number, path in _open_files().items() if number not in before and path not in _HARMLESS]:
        return f"importing it opened {', '.join(sorted(opened))}"
    if started := children(os.getpid()):
        return f"importing it started {len(started)} processes"
    if _threads() > 1:
        _restart_library_threads()
    if (count := _threads()) > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"importing it started {count - 1} threads" + (f" ({', '.join(names)})" if names else "")
    return None


def _restart_library_threads() -> None:
    """Fork once. Libraries with fork handlers (OpenBLAS) end their threads for it and restart them when needed."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _fork_on_request(control: socket.socket, owner: int, owner_started: int) -> None:
    """Serve fork requests until the owner closes the socket or is gone."""
    inherited = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    woken, wakes = child_wakeup_pipe()
    supervisors: set[int] = set()
    while start_time(owner) == owner_started:
        while (ended := reap_child()) is not None:
            supervisors.discard(ended[0])
        for orphan in set(children(os.getpid())) - supervisors:  # of a supervisor that was killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        readable, _, _ = select.select([control.fileno(), woken], [], [], process_supervisor.OWNER_POLL_S)
        if woken in readable:
            os.read(woken, 4096)
        if control.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
            if not message:
                return
            try:
                pid = os.fork()
            except OSError as error:
                answer: dict[str, object] = {"error": [error.errno, error.strerror]}
            else:
                if pid == 0:
                    control.close()
                    signal.set_wakeup_fd(-1)
                    os.close(woken)
                    os.close(wakes)
                    signal.signal(signal.SIGCHLD, inherited)
                    _become_supervisor(message, descriptors)
                supervisors.add(pid)
                answer = {"pid": pid, "start_time": start_time(pid)}
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                control.sendall(json.dumps(answer).encode())


def _become_supervisor(message: bytes, descriptors: list[int]) -> NoReturn:
    """Turn this fork into a supervisor."""
    try:
        os.setsid()
        calls, control, output = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # Python's own generator reseeds itself
        config = SupervisorConfig.from_json(message.decode())
        process_supervisor.supervise(dataclasses.replace(config, calls=calls, control=control))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _open_files() -> dict[int, str]:
    """The target of each open descriptor of this process."""
    files = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            files[int(entry.name)] = str(entry.readlink())
    return files


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))

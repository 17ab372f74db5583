"""ForkServer: this process's side of a fork server, which forks the supervisors of one factory's simulators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from agentfly.core.async_tasks import retrieve_exception
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.pickling import dumps
from agentfly.resources.environments.private_directory import PrivateDirectory
from agentfly.resources.environments.process_supervisor import SupervisorConfig
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process.child import minimal_environment, python_command, search_path
from agentfly.resources.process.ledger import REMOVE_DIRECTORY, CleanupRecord
from agentfly.resources.process.procfs import start_time
from agentfly.resources.spec import typed_key

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 2.0
"""Seconds that a fork server outlives its last simulator, so that a replacement need not import again."""

FORK_TIMEOUT_S = 10.0
"""Seconds without progress after which a fork server with pending requests is replaced as stuck."""

MAX_PENDING_FORKS = 16
"""Maximum number of pending fork requests. Forks happen one after another, and the request socket is short."""


ForkReply = asyncio.Future[dict[str, Any]]


class ForkServer:
    """Runs a fork server process while it is needed: starts it, sends it requests, replaces it if it dies.

    Args:
        spec: the spec of the simulators; its factory is imported.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._factory = spec.factory
        self._label = spec.label
        self._variables = dict(spec.env)
        self._workdir = spec.workdir
        self._directory: PrivateDirectory | None = None
        self._users = 0
        self._closing_later: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._fork_problem: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pending: deque[ForkReply] = deque()
        self._fork_timer: asyncio.TimerHandle | None = None
        self.turn = asyncio.Semaphore(MAX_PENDING_FORKS)
        """Each start holds it from `ready` to the reply of `fork`."""

    def acquire(self) -> None:
        """Register one more user of the fork server."""
        self._users += 1
        if self._closing_later is not None:
            self._closing_later.cancel()

    def release(self) -> None:
        """Unregister a user. After the last one the fork server closes, with a delay."""
        self._users -= 1
        if self._users == 0 and self._starting is not None and not self._starting.done():
            self._starting.cancel()
            self.close()  # no one waits for the start any more; it may hang
        elif self._users == 0:
            self._closing_later = asyncio.get_running_loop().create_task(
                self._close_later(), name=f"fork server of {self._label}"
            )

    async def ready(self) -> bool:
        """Wait until the fork server can fork. Returns False if an import prevents forking.

        Raises:
            OSError: the fork server cannot be started.
            ConnectionError: it ended before it was ready.
        """
        if self._fork_problem is None:
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._start())
                self._starting.add_done_callback(retrieve_exception)
            await asyncio.shield(self._starting)
        return self._fork_problem is None

    def fork(self, config: SupervisorConfig, output: int) -> ForkReply:
        """Fork a supervisor. The fork server gets copies of the descriptors. Call `ready` first.

        Returns:
            a future of the supervisor's ``pid`` and ``start_time``; a ConnectionError if the fork server died.
        """
        reply: ForkReply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(retrieve_exception)
        try:
            if self._control is None:  # the fork server has died since it was ready
                raise ConnectionResetError("it has ended")
            socket.send_fds(self._control, [config.to_json().encode()], [config.calls, config.control, output])
        except OSError as error:
            reply.set_exception(ConnectionError(f"The fork server of {self._label} cannot be reached: {error}"))
        else:
            self._pending.append(reply)
            if self._fork_timer is None:
                self._restart_fork_timer()
        return reply

    def _restart_fork_timer(self) -> None:
        """Restart the time limit for the oldest pending request."""
        if self._fork_timer is not None:
            self._fork_timer.cancel()
        pending = bool(self._pending)
        self._fork_timer = asyncio.get_running_loop().call_later(FORK_TIMEOUT_S, self.close) if pending else None

    async def _start(self) -> None:
        ready: ForkReply = asyncio.get_running_loop().create_future()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parcel = os.memfd_create("factory")
        try:
            with far:
                _write(parcel, dumps((self._factory,), ("factory",)))
                self._directory = PrivateDirectory("imports")
                traces = {"directory": str(self._directory.path)}
                with CleanupRecord("imports", REMOVE_DIRECTORY, traces):  # then the process's supervisor removes it
                    self._directory.make()
                    self._process = self._spawn(self._directory, far, parcel)
        except BaseException:
            near.close()
            self.close()
            raise
        finally:
            os.close(parcel)
        near.setblocking(False)
        self._control = near
        self._pending.append(ready)
        asyncio.get_running_loop().add_reader(near, self._on_message)
        self._fork_problem = (await ready)["obstacle"]
        if self._fork_problem is not None:
            self.close()
            logger.warning(
                "Each instance of %s imports for itself, which takes longer: %s. Leave that import to the factory or "
                'function; or, for an EnvironmentSpec, write starts="spawn", which is the same without this warning.',
                self._label,
                self._fork_problem,
            )

    def _on_message(self) -> None:
        """Handle a message of the fork server."""
        assert self._control is not None
        message = b""
        with contextlib.suppress(OSError):
            message = self._control.recv(1 << 16)
        if not message:
            self.close()
            return
        if not self._pending or (reply_fields := _parse_reply(message)) is None:
            self.close()
            return
        reply = self._pending.popleft()
        self._restart_fork_timer()
        if reply.done():
            return
        if "error" in reply_fields:
            reply.set_exception(OSError(*reply_fields["error"]))
        else:
            reply.set_result(reply_fields)

    async def _close_later(self) -> None:
        try:
            await asyncio.sleep(IDLE_TIMEOUT_S)
        finally:
            if self._users == 0:
                self.close()

    def close(self) -> None:
        """Stop the fork server. Its forks live on. If it is waiting for requests, it cleans up and ends by itself."""
        waits = self._starting is not None and self._starting.done() and self._fork_problem is None
        control, self._control = self._control, None
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        self._starting = None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        if process is not None and not waits:
            process.kill()
        if directory is not None and not directory.try_remove_empty():
            THREAD_POOL.submit(
                _clean_up, process, directory
            )  # a process with gigabytes of imports takes a while to end
        elif process is not None:
            THREAD_POOL.submit(_end, process)
        if self._fork_timer is not None:
            self._fork_timer.cancel()
            self._fork_timer = None
        while self._pending:
            if not (reply := self._pending.popleft()).done():
                reply.set_exception(ConnectionError(f"The fork server of {self._label} has ended."))

    def _spawn(self, directory: PrivateDirectory, control: socket.socket, parcel: int) -> subprocess.Popen[bytes]:
        me, main = os.getpid(), "agentfly.resources.environments.fork_server_main:main"
        return subprocess.Popen(
            python_command(main, control.fileno(), parcel, me, start_time(me) or 0, str(directory.path)),
            cwd=self._workdir or directory.work,
            env={**minimal_environment(), "TMPDIR": directory.temporary, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(control.fileno(), parcel),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program
        )


def _parse_reply(message: bytes) -> dict[str, Any] | None:
    """Parse a reply; None if it is malformed, because an import may have written to the socket."""
    try:
        reply = json.loads(message)
    except ValueError:
        return None
    match reply:
        case {"obstacle": str() | None} | {"pid": int(), "start_time": int() | None} | {"error": [int(), str()]}:
            return dict(reply)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(FORK_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it is stopped or stuck
        process.kill()
        process.wait()


def _clean_up(process: subprocess.Popen[bytes] | None, directory: PrivateDirectory) -> None:
    if process is not None:
        _end(process)
    try:
        remove_tree(directory.path)
    except OSError as error:
        logger.warning("Files that an import left in %s cannot be removed: %s", directory.path, error)


_fork_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Any, ForkServer]] = WeakKeyDictionary()
_fork_servers_lock = threading.Lock()


def fork_server_for(spec: EnvironmentSpec) -> ForkServer:
    """The fork server shared by all simulators of this event loop with the same imports."""
    key = (typed_key(spec.factory), spec.env, spec.workdir, tuple(search_path()))
    with _fork_servers_lock:
        of_loop = _fork_servers.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    server = of_loop.get(key)
    if server is None:
        server = of_loop[key] = ForkServer(spec)
    return server


def _write(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)

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

from agentfly.core.threads.pool import THREAD_POOL
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.pickling import dumps
from agentfly.resources.environments.private_directory import PrivateDirectory
from agentfly.resources.environments.process_supervisor import SupervisorConfig
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.process.child import minimal_environment, python_command, search_path
from agentfly.resources.process.procfs import start_time
from agentfly.resources.spec import typed_key

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 2.0
"""Seconds that a zygote outlives the last simulator, so that one that is replaced need not import anew."""

FORK_TIMEOUT_S = 10.0
"""Seconds for which a zygote that is asked to fork may do nothing before it is taken for stuck and is replaced."""

FORKS_ASKED_FOR = 16
"""Starts that ask a zygote at a time. It forks one after another, and the socket of requests is short."""


ForkReply = asyncio.Future[dict[str, Any]]


class ForkServer:
    """Has a zygote while somebody needs it: warms it up, passes requests on, replaces it if it dies.

    Args:
        spec: what the simulators are; its factory is what is imported.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._factory = spec.factory
        self._label = spec.label
        self._variables = dict(spec.env)
        self._workdir = spec.workdir
        self._directory: PrivateDirectory | None = None
        self._claims = 0
        self._lingering: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._fork_problem: str | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pending: deque[ForkReply] = deque()
        self._answer_due: asyncio.TimerHandle | None = None
        self.turn = asyncio.Semaphore(FORKS_ASKED_FOR)
        """Is held by each start from `warm` to the reply of `fork`."""

    def acquire(self) -> None:
        """Say that the zygote is needed."""
        self._claims += 1
        if self._lingering is not None:
            self._lingering.cancel()

    def release(self) -> None:
        """Say that it is not needed any more."""
        self._claims -= 1
        if self._claims == 0 and self._starting is not None and not self._starting.done():
            self._starting.cancel()
            self.close()  # nobody waits for it any more, perhaps because it hangs
        elif self._claims == 0:
            self._lingering = asyncio.get_running_loop().create_task(
                self._close_later(), name=f"zygote of {self._label}"
            )

    async def ready(self) -> bool:
        """Wait until there is a zygote that can fork; False if what it imported is in the way.

        Raises:
            OSError: the zygote cannot be started.
            ConnectionError: it ended before it was warm.
        """
        if self._fork_problem is None:
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._warm_up())
                self._starting.add_done_callback(_look_at)
            await asyncio.shield(self._starting)
        return self._fork_problem is None

    def fork(self, charge: SupervisorConfig, output: int) -> ForkReply:
        """Have the zygote fork a keeper; the descriptors are the zygote's own from now on. Needs `warm`.

        Returns:
            ``pid`` and ``start_time`` of the keeper, in time; or a ConnectionError, if the zygote died.
        """
        reply: ForkReply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_look_at)
        try:
            if self._control is None:  # the zygote has died since it was warm
                raise ConnectionResetError("it has ended")
            socket.send_fds(self._control, [charge.to_json().encode()], [charge.calls, charge.life, output])
        except OSError as error:
            reply.set_exception(ConnectionError(f"The zygote of {self._label} cannot be reached: {error}"))
        else:
            self._pending.append(reply)
            if self._answer_due is None:
                self._expect_an_answer()
        return reply

    def _expect_an_answer(self) -> None:
        """Give the zygote its time for the first of the requests that it has not answered."""
        if self._answer_due is not None:
            self._answer_due.cancel()
        asked = bool(self._pending)
        self._answer_due = asyncio.get_running_loop().call_later(FORK_TIMEOUT_S, self.close) if asked else None

    async def _warm_up(self) -> None:
        ready: ForkReply = asyncio.get_running_loop().create_future()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parcel = os.memfd_create("factory")
        try:
            with far:
                _write(parcel, dumps((self._factory,), ("factory",)))
                self._directory = PrivateDirectory("imports")
                self._directory.make()
                self._zygote = self._spawn(self._directory, far, parcel)
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
        """Take in what the zygote says."""
        assert self._control is not None
        message = b""
        with contextlib.suppress(OSError):
            message = self._control.recv(1 << 16)
        if not message:
            self.close()
            return
        if not self._pending or (said := _understood(message)) is None:
            self.close()
            return
        reply = self._pending.popleft()
        self._expect_an_answer()
        if reply.done():
            return
        if "error" in said:
            reply.set_exception(OSError(*said["error"]))
        else:
            reply.set_result(said)

    async def _close_later(self) -> None:
        try:
            await asyncio.sleep(IDLE_TIMEOUT_S)
        finally:
            if self._claims == 0:
                self.close()

    def close(self) -> None:
        """End the zygote. What it has forked lives on. One that waits for requests ends, and tidies up, by itself."""
        waits = self._starting is not None and self._starting.done() and self._fork_problem is None
        control, self._control = self._control, None
        zygote, self._zygote = self._zygote, None
        directory, self._directory = self._directory, None
        self._starting = None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        if zygote is not None and not waits:
            zygote.kill()
        if directory is not None and not directory.try_remove_empty():
            THREAD_POOL.submit(_tidy_up, zygote, directory)  # one that has imported gigabytes takes a while to be gone
        elif zygote is not None:
            THREAD_POOL.submit(_end, zygote)
        if self._answer_due is not None:
            self._answer_due.cancel()
            self._answer_due = None
        while self._pending:
            if not (reply := self._pending.popleft()).done():
                reply.set_exception(ConnectionError(f"The zygote of {self._label} has ended."))

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


def _understood(message: bytes) -> dict[str, Any] | None:
    """What a zygote said; None if it is nothing that one says, as an import may have written there."""
    try:
        said = json.loads(message)
    except ValueError:
        return None
    match said:
        case {"obstacle": str() | None} | {"pid": int(), "start_time": int() | None} | {"error": [int(), str()]}:
            return dict(said)
    return None


def _end(zygote: subprocess.Popen[bytes]) -> None:
    try:
        zygote.wait(FORK_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it is stopped, or stuck
        zygote.kill()
        zygote.wait()


def _tidy_up(zygote: subprocess.Popen[bytes] | None, directory: PrivateDirectory) -> None:
    if zygote is not None:
        _end(zygote)
    try:
        remove_tree(directory.path)
    except OSError as error:
        logger.warning("What an import left in %s cannot be removed: %s", directory.path, error)


_nurseries: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Any, ForkServer]] = WeakKeyDictionary()
_looking = threading.Lock()


def fork_server_for(spec: EnvironmentSpec) -> ForkServer:
    """The nursery that all simulators share in this event loop whose imports mean the same."""
    key = (typed_key(spec.factory), spec.env, spec.workdir, tuple(search_path()))
    with _looking:
        mine = _nurseries.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    nursery = mine.get(key)
    if nursery is None:
        nursery = mine[key] = ForkServer(spec)
    return nursery


def _write(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)


def _look_at(future: asyncio.Future[Any]) -> None:
    """Whoever asked may be gone; a failure is then nobody's."""
    if not future.cancelled():
        future.exception()

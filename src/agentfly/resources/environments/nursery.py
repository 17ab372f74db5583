"""Nursery: this process's side of a zygote, which forks the keepers of all simulators of one factory."""

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
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from agentfly.resources.environments.keeper import Charge
from agentfly.resources.environments.parcel import pack
from agentfly.resources.fresh_python import fresh_python, search_path
from agentfly.resources.identity import start_time
from agentfly.threads.pool import THREADS

logger = logging.getLogger(__name__)

LINGER_S = 2.0
"""Seconds that a zygote outlives the last simulator, so that one that is replaced need not import anew."""

ANSWER_S = 10.0
"""Seconds after which a zygote that has not forked is taken for stuck and is replaced."""


Factory = Callable[..., Any] | str
Reply = asyncio.Future[dict[str, Any]]


class Nursery:
    """Has a zygote while somebody needs it: warms it up, passes requests on, replaces it if it dies.

    Args:
        factory: what makes the simulators.
        label: what they are called in messages.
    """

    def __init__(self, factory: Factory, label: str) -> None:
        self._factory = factory
        self._label = label
        self._claims = 0
        self._lingering: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._obstacle: str | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._awaited: deque[Reply] = deque()

    def claim(self) -> None:
        """Say that the zygote is needed."""
        self._claims += 1
        if self._lingering is not None:
            self._lingering.cancel()

    def drop(self) -> None:
        """Say that it is not needed any more."""
        self._claims -= 1
        if self._claims == 0 and self._warming is not None and not self._warming.done():
            self._warming.cancel()
            self.close()  # nobody waits for it any more, perhaps because it hangs
        elif self._claims == 0:
            self._lingering = asyncio.get_running_loop().create_task(self._linger(), name=f"zygote of {self._label}")

    async def warm(self) -> bool:
        """Wait until there is a zygote that can fork; False if what it imported is in the way.

        Raises:
            OSError: the zygote cannot be started.
            ConnectionError: it ended before it was warm.
        """
        if self._obstacle is None:
            if self._warming is None:
                self._warming = asyncio.get_running_loop().create_task(self._warm_up())
                self._warming.add_done_callback(_look_at)
            await asyncio.shield(self._warming)
        return self._obstacle is None

    def fork(self, charge: Charge, output: int) -> Reply:
        """Have the zygote fork a keeper; the descriptors are the zygote's own from now on. Needs `warm`.

        Returns:
            ``pid`` and ``start_time`` of the keeper, in time; or a ConnectionError, if the zygote died.
        """
        reply: Reply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_look_at)
        try:
            if self._control is None:  # the zygote has died since it was warm
                raise ConnectionResetError("it has ended")
            socket.send_fds(self._control, [charge.to_json().encode()], [charge.calls, charge.life, output])
        except OSError as error:
            reply.set_exception(ConnectionError(f"The zygote of {self._label} cannot be reached: {error}"))
        else:
            self._awaited.append(reply)
            asyncio.get_running_loop().call_later(ANSWER_S, self._expect, reply)
        return reply

    def _expect(self, reply: Reply) -> None:
        if reply in self._awaited:
            self.close()

    async def _warm_up(self) -> None:
        ready: Reply = asyncio.get_running_loop().create_future()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parcel = os.memfd_create("factory")
        try:
            with far:
                _write(parcel, pack((self._factory,), ("factory",)))
                self._zygote = _spawn(far, parcel)
        except BaseException:
            near.close()
            self._warming = None
            raise
        finally:
            os.close(parcel)
        near.setblocking(False)
        self._control = near
        self._awaited.append(ready)
        asyncio.get_running_loop().add_reader(near, self._hear)
        self._obstacle = (await ready)["obstacle"]
        if self._obstacle is not None:
            self.close()
            logger.warning(
                "Each instance of %s imports for itself, which takes longer: %s. Leave that import to the factory or "
                'function; or, for an EnvironmentSpec, write starts="spawn", which is the same without this warning.',
                self._label,
                self._obstacle,
            )

    def _hear(self) -> None:
        """Take in what the zygote says."""
        assert self._control is not None
        message = b""
        with contextlib.suppress(OSError):
            message = self._control.recv(1 << 16)
        if not message:
            self.close()
            return
        reply, said = self._awaited.popleft(), json.loads(message)
        if reply.done():
            return
        if "error" in said:
            reply.set_exception(OSError(*said["error"]))
        else:
            reply.set_result(said)

    async def _linger(self) -> None:
        try:
            await asyncio.sleep(LINGER_S)
        finally:
            if self._claims == 0:
                self.close()

    def close(self) -> None:
        """End the zygote. What it has forked lives on."""
        control, self._control = self._control, None
        zygote, self._zygote = self._zygote, None
        self._warming = None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        if zygote is not None:
            zygote.kill()
            THREADS.submit(zygote.wait)  # one that has imported gigabytes takes a while to be gone
        while self._awaited:
            if not (reply := self._awaited.popleft()).done():
                reply.set_exception(ConnectionError(f"The zygote of {self._label} has ended."))


_nurseries: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Any, Nursery]] = WeakKeyDictionary()
_looking = threading.Lock()


def nursery_of(factory: Factory, label: str) -> Nursery:
    """The nursery that all simulators of a factory share in this event loop."""
    key = (factory, tuple(search_path()))
    with _looking:
        mine = _nurseries.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    nursery = mine.get(key)
    if nursery is None:
        nursery = mine[key] = Nursery(factory, label)
    return nursery


def _spawn(control: socket.socket, parcel: int) -> subprocess.Popen[bytes]:
    me = os.getpid()
    return subprocess.Popen(
        fresh_python("agentfly.resources.environments.zygote:main", control.fileno(), parcel, me, start_time(me) or 0),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(control.fileno(), parcel),
        start_new_session=True,  # Ctrl-C at the terminal is for the user's program
    )


def _write(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)


def _look_at(future: asyncio.Future[Any]) -> None:
    """Whoever asked may be gone; a failure is then nobody's."""
    if not future.cancelled():
        future.exception()

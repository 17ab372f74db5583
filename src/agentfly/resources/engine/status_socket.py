"""StatusSocket: a socket beside an engine's ledger that serves its snapshot to other processes of the user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 5.0
"""Seconds that a client may take to read."""

_QUEUE = 128  # of those who connect and wait

MAX_STATUS_CLIENTS = 8
"""How many may look at a time; the next wait until one of them is done."""


def socket_path(ledger: Path) -> Path:
    """Return the path of the status socket of the engine with this ledger."""
    return ledger.with_suffix(".sock")


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield an equivalent path that is short enough for a socket's address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class StatusSocket:
    """Sends each client one snapshot as JSON. It costs nothing without clients.

    Args:
        look: returns the snapshot, JSON-able.
    """

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = look
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: set[asyncio.Task[None]] = set()

    def open(self, ledger: Path) -> None:
        """Open the socket beside a ledger, unless it is open there. A failure is logged.

        It closes by itself when this process has no descriptors left for clients.
        """
        path = socket_path(ledger)
        if path == self._path:
            return
        self.close()
        self._path = path
        try:
            self._socket = _listen(path)
        except OSError as error:
            logger.warning("`agentfly resources ps` will not see what this run has: %s: %s", path, error)
            return
        self._loop = asyncio.get_running_loop()
        self._listen_on()

    def close(self) -> None:
        """Close it, and remove it from the directory."""
        for answer in self._answers:
            answer.cancel()
        if self._socket is not None and self._loop is not None and self._path is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._socket = self._path = None

    def _listen_on(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._socket, self._accept, self._socket)

    def _accept(self, listening: socket.socket) -> None:
        try:
            looker, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # gone already
            return
        except OSError as error:  # for want of descriptors; whoever waits would keep the loop busy
            logger.warning("`agentfly resources ps` does not see this run until it starts something: %s", error)
            self.close()
            return
        looker.setblocking(False)
        answer = asyncio.get_running_loop().create_task(self._answer(looker), name="answer who looks at the engine")
        self._answers.add(answer)
        answer.add_done_callback(self._answered)
        if len(self._answers) >= MAX_STATUS_CLIENTS:
            asyncio.get_running_loop().remove_reader(listening)

    def _answered(self, answer: asyncio.Task[None]) -> None:
        if len(self._answers) >= MAX_STATUS_CLIENTS:
            self._listen_on()
        self._answers.discard(answer)

    async def _answer(self, looker: socket.socket) -> None:
        with looker, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                text = json.dumps(self._snapshot())
                await asyncio.get_running_loop().sock_sendall(looker, text.encode())


def _listen(path: Path) -> socket.socket:
    """A listening socket that only the user can connect to. It appears once it listens."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = path.with_suffix(".sock-draft")
    try:
        listening.setblocking(False)
        os.fchmod(listening.fileno(), 0o600)  # what bind() makes gets this mode
        with short_path(draft) as address:
            listening.bind(address)
        listening.listen(_QUEUE)
        draft.rename(path)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return listening

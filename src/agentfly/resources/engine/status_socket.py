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
"""Time limit for a client to read the snapshot, in seconds."""

_BACKLOG = 128  # maximum number of clients that wait to be accepted

MAX_STATUS_CLIENTS = 8
"""Maximum number of clients at a time. Others wait until one of them has been served."""


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
        take_snapshot: returns the snapshot as a JSON-able mapping.
    """

    def __init__(self, take_snapshot: Callable[[], dict[str, Any]]) -> None:
        self._take_snapshot = take_snapshot
        self._path: Path | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: set[asyncio.Task[None]] = set()

    def open(self, ledger: Path) -> None:
        """Open the socket beside a ledger, unless it is already open there. A failure is logged.

        The socket closes when this process has no file descriptors left for clients.
        """
        path = socket_path(ledger)
        if path == self._path:
            return
        self.close()
        self._path = path
        try:
            self._socket = _listen(path)
        except OSError as error:
            logger.warning("`agentfly resources ps` cannot show this run: %s: %s", path, error)
            return
        self._loop = asyncio.get_running_loop()
        self._listen_on()

    def close(self) -> None:
        """Close the socket and remove its file."""
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
            client, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client is gone
            return
        except OSError as error:  # no descriptors are left, and waiting clients would keep the event loop busy
            logger.warning("`agentfly resources ps` cannot show this run until its next start: %s", error)
            self.close()
            return
        client.setblocking(False)
        answer = asyncio.get_running_loop().create_task(self._answer(client), name="serve the engine's status")
        self._answers.add(answer)
        answer.add_done_callback(self._answered)
        if len(self._answers) >= MAX_STATUS_CLIENTS:
            asyncio.get_running_loop().remove_reader(listening)

    def _answered(self, answer: asyncio.Task[None]) -> None:
        if len(self._answers) >= MAX_STATUS_CLIENTS:
            self._listen_on()
        self._answers.discard(answer)

    async def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                text = json.dumps(self._take_snapshot())
                await asyncio.get_running_loop().sock_sendall(client, text.encode())


def _listen(path: Path) -> socket.socket:
    """Return a listening socket to which only this user can connect. Its file appears once it listens."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = path.with_suffix(".sock-draft")
    try:
        listening.setblocking(False)
        os.fchmod(listening.fileno(), 0o600)  # the mode of the file that bind() creates
        with short_path(draft) as address:
            listening.bind(address)
        listening.listen(_BACKLOG)
        draft.rename(path)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return listening

"""Bell: wakes up who waits in another process. A bell that is not heard costs no more than the time to look again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(name: str, heard: Callable[[], None]) -> Iterator[None]:
    """Have ``heard`` called in the running loop for each `ring` of ``name`` while the block runs."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.setblocking(False)

        def answer() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    bell.recv(1)
                    heard()

        try:
            bell.bind(_address(name))
            loop.add_reader(bell, answer)
        except (OSError, NotImplementedError):  # a system without such addresses, or a loop without readers
            yield
            return
        try:
            yield
        finally:
            loop.remove_reader(bell)


def ring(name: str) -> None:
    """Wake up who listens for a name, if there is somebody."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.setblocking(False)
        bell.sendto(b".", _address(name))


def _address(name: str) -> str:
    return f"\0agentfly/{name}"  # in no directory (unix(7), abstract sockets): nobody has to remove it

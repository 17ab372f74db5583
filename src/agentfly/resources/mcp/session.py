"""Session: a conversation with a server, which lives in a task of its own and may be used from any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client
from mcp.types import Implementation

import agentfly
from agentfly.errors import AgentFlyError, say

T = TypeVar("T")


class SessionOver(Exception):
    """The session has ended."""


class Session:
    """A client's session with a server.

    Args:
        transport: how its messages get there and back.
        name: what its task is called.
    """

    def __init__(self, transport: AbstractAsyncContextManager[Any], name: str) -> None:
        self._transport = transport
        self._name = name
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] | None = None
        self._life: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Future[Any]] = set()

    async def start(self) -> Client:
        """Begin it, and wait until the server has said what it is.

        Raises:
            SessionOver: it came to nothing; the message says why.
            AgentFlyError: as the transport raises it.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(self._ready), name=self._name)
        self._life.add_done_callback(lambda life: life.cancelled() or life.exception())  # whoever asks is told
        waited: list[asyncio.Future[Any]] = [self._ready, self._life]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        raise self._failure()

    @property
    def over(self) -> bool:
        """Whether it has ended, or has not begun."""
        return self._life is None or self._life.done()

    async def ask(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """What the server answers.

        Raises:
            SessionOver: the session is over, or ended meanwhile.
            Exception: what the request raises.
        """
        if self._life is None or self._ready is None or self._life.done() or not self._ready.done():
            raise self._failure()
        asking = asyncio.ensure_future(request(self._ready.result()))
        self._asking.add(asking)
        asking.add_done_callback(self._answered)
        try:
            await asyncio.wait({asking, self._life}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self._failure()
            return asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def retire(self, within_s: float) -> None:
        """End it once what is being asked has been answered, or after so many seconds."""
        if self._asking:
            await asyncio.wait({*self._asking}, timeout=within_s)
        await self.stop(within_s)

    async def stop(self, within_s: float) -> None:
        """End it in good order, and if that takes too long in any."""
        if self._life is None:
            return
        self._closing.set()
        _, pending = await asyncio.wait({self._life}, timeout=within_s)
        if pending:
            self._life.cancel()
            await asyncio.wait({self._life}, timeout=within_s)

    async def _live(self, ready: asyncio.Future[Client]) -> None:
        info = Implementation(name="agentfly", version=agentfly.__version__)
        async with Client(self._transport, client_info=info, cache=None) as client:
            if not ready.done():
                ready.set_result(client)
            await self._closing.wait()

    def _answered(self, asking: asyncio.Future[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # whoever asked may have gone meanwhile

    def _failure(self) -> Exception:
        """Why it is over."""
        life = self._life
        if life is None or not life.done():
            return SessionOver("it has not begun")
        if life.cancelled():
            return SessionOver("it was ended")
        error = _innermost(life.exception())
        if isinstance(error, AgentFlyError):
            return error
        failure = SessionOver("it was ended" if error is None else say(error))
        failure.__cause__ = error
        return failure


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Connection: the way to a server. It is a session, and a new one where the server has forgotten the old."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, Tool

from agentfly.errors import ResourceError, message_of
from agentfly.resources.mcp.failures import failure_of
from agentfly.resources.mcp.http_client import Trouble, trouble_in
from agentfly.resources.mcp.listing import all_tools
from agentfly.resources.mcp.session import Session, SessionOver
from agentfly.resources.mcp.spec import MCPServerSpec

T = TypeVar("T")

_CLOSED = "Connection closed"  # what the package says of requests over a session that can carry none any more


class SessionForgotten(Exception):
    """The server has forgotten the session, with what earlier calls have left in it."""


class Connection:
    """A way to a server, over which many may ask at a time.

    Attributes:
        tools: the server's tools.
        unreachable: whether nobody was there to answer the last request.

    Args:
        transport: how messages of a session get there and back; called for each session.
        spec: the server.
        name: what the server is called.
    """

    def __init__(
        self, transport: Callable[[], AbstractAsyncContextManager[Any]], spec: MCPServerSpec, name: str
    ) -> None:
        self.tools: tuple[Tool, ...] = ()
        self.unreachable = False
        self._transport = transport
        self._spec = spec
        self._name = name
        self._session = Session(transport(), f"session of {name}")
        self._has_answered = False
        self._renewal: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin the session, and learn which tools there are.

        Raises:
            SessionOver: the session came to nothing; the message says why.
            EndlessListing: the tools cannot be listed.
            AgentFlyError: as the transport raises it.
            Exception: as the client raises it.
        """
        await self._session.start()
        self.tools = await self._session.ask(all_tools)

    @property
    def over(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._session.over

    async def greet(self) -> None:
        """Have the server answer something, as cheaply as its version of the protocol allows.

        Raises:
            Exception: it does not.
        """
        await self._session.ask(_greet)

    async def ask(self, request: Callable[[Client], Awaitable[T]], *, keeps_state: bool) -> T:
        """What the server answers.

        Args:
            request: asks a client.
            keeps_state: whether a session keeps what calls leave in it, so that a new one cannot stand in for it.

        Raises:
            SessionOver: the server is gone.
            SessionForgotten: the server has forgotten the session, which keeps something.
            ToolError: the server refuses the call as it is.
            ResourceError: there is no answer, or none that the protocol knows.
        """
        session = self._session
        try:
            return await self._answer(session, request)
        except Exception as error:
            if trouble_in(error) is not Trouble.SESSION_LOST:
                raise self._failure(session, error) from error
        if keeps_state and self._has_answered:
            raise SessionForgotten("it has forgotten the session, and with it what the calls before have done")
        await self._renewed(session)
        session = self._session
        try:
            return await self._answer(session, request)
        except Exception as error:
            raise self._failure(session, error) from error

    async def close(self, grace_s: float) -> None:
        """End all sessions, in good order as far as that is done in so many seconds."""
        going = [task for task in (self._renewal, *self._retiring) if task is not None and not task.done()]
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going)
        await self._session.stop(grace_s)

    async def _answer(self, session: Session, request: Callable[[Client], Awaitable[T]]) -> T:
        trouble: Trouble | None = None
        try:
            return await session.ask(request)
        except Exception as error:
            trouble = trouble_in(error)
            raise
        finally:  # one that is given up may have had its effect, too
            if session is self._session:
                self.unreachable = trouble is Trouble.UNREACHABLE
                self._has_answered = self._has_answered or trouble is not Trouble.SESSION_LOST

    def _failure(self, session: Session, error: Exception) -> Exception:
        """What a request failed with. A session that has been replaced takes nobody along."""
        closed = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
        if isinstance(error, SessionOver) or (closed and (self._spec.command or message_of(error) == _CLOSED)):
            if session is self._session:
                return error if isinstance(error, SessionOver) else SessionOver(message_of(error))
            return ResourceError(f"{self._name} did not answer a call: its session has ended.")
        return failure_of(error, self._name, self._spec.tool_error_codes)

    async def _renewed(self, session: Session) -> None:
        """Have a new session in place of one that the server has forgotten. Requests that overlap share it."""
        if self._session is not session:
            return
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew(session), name=f"new session of {self._name}")
            self._renewal.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits is told
        await asyncio.shield(self._renewal)

    async def _renew(self, old: Session) -> None:
        new = Session(self._transport(), f"session of {self._name}")
        limit_s = self._spec.reset_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await new.start()
                tools = await new.ask(all_tools)
        except Exception as error:
            await new.stop(limit_s / 4)
            why = f"within {limit_s:g} s" if isinstance(error, TimeoutError) else f"({message_of(error)})"
            raise SessionOver(f"it has forgotten the session, and a new one could not be had {why}") from error
        except asyncio.CancelledError:
            await new.stop(limit_s / 4)
            raise
        self._session, self.tools, self._has_answered = new, tools, False
        retiring = asyncio.create_task(old.retire(self._spec.call_timeout_s))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)


async def _greet(client: Client) -> None:
    from mcp.types import EmptyResult, PingRequest

    if client.session.discover_result is not None:
        await client.session.send_discover(client.protocol_version)
    else:
        await client.session.send_request(PingRequest(), EmptyResult)

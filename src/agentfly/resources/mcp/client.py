"""The MCP client: sessions, reconnection, listing of all tools, and translation of failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT, Implementation, Tool

import agentfly
from agentfly.core.errors import AgentFlyError, ResourceError, ToolError, describe_error, error_message
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.mcp.transports import TransportFailure, transport_failure_of

MAX_PAGES = 10_000
"""Number of pages after which a list of tools counts as endless."""


class EndlessToolListing(Exception):
    """A list of tools that does not end. The message says why, as a sentence about "it"."""


async def list_all_tools(client: Client) -> tuple[Tool, ...]:
    """Return all tools of a server, from all pages of its list.

    A cursor may be the empty text. For some servers it means that there is no further page. That page then fails or
    is the first one again.

    Raises:
        EndlessToolListing: a cursor is repeated, or there are too many pages.
        Exception: raised by the client.
    """
    if client.server_capabilities.tools is None:
        return ()
    page = await client.list_tools()
    tools = list(page.tools)
    cursors: set[str] = set()
    while (cursor := page.next_cursor) is not None:
        if cursor in cursors:
            raise EndlessToolListing(f"its list of tools does not end: the cursor {cursor[:100]!r} came back")
        if len(cursors) == MAX_PAGES:
            raise EndlessToolListing(f"its list of tools does not end: it has more than {MAX_PAGES} pages")
        cursors.add(cursor)
        try:
            page = await client.list_tools(cursor=cursor)
        except MCPError as error:
            if cursor or error.code != INVALID_PARAMS:
                raise
            break
        if not cursor and _adds_nothing(page.tools, tools):
            break
        tools += page.tools
    return tuple(tools)


def _adds_nothing(page: list[Tool], tools: list[Tool]) -> bool:
    known = {tool.name for tool in tools}
    return all(tool.name in known for tool in page)


_RESERVED = range(-32768, -31999)  # by JSON-RPC 2.0, section 5.1
_SAID = 1000  # characters


def to_agentfly_error(error: Exception, name: str, tool_error_codes: Collection[int]) -> AgentFlyError:
    """Return the typed error for a failed call.

    Errors that the server reports about a call go to the model. HTTP errors, and answers that are not messages of the
    protocol, are infrastructure failures.

    Args:
        error: the client's exception.
        name: name of the server, for messages.
        tool_error_codes: the reserved codes that mean that the call was wrong.
    """
    if isinstance(error, AgentFlyError):
        return error
    said = error_message(error)[:_SAID]
    if not isinstance(error, MCPError):
        details = said if isinstance(error, RuntimeError) else describe_error(error)[:_SAID]
        return ResourceError(f"{name} violates the protocol: {details}")
    if transport_failure_of(error) or error.code == REQUEST_TIMEOUT:
        return ResourceError(f"{name} did not answer a call: {said}.")
    if error.code in _RESERVED and error.code not in tool_error_codes:
        return ResourceError(
            f"{name} could not answer a call: {said} (code {error.code}). If it says so of what a model can cause, "
            f"list the code: MCPServerSpec(tool_error_codes={(*tool_error_codes, error.code)})."
        )
    return ToolError(said)


T = TypeVar("T")


class SessionClosed(Exception):
    """The session has ended."""


class MCPSession:
    """A client's session with a server.

    Args:
        transport: carries the messages in both directions.
        name: the name of its task.
    """

    def __init__(self, transport: AbstractAsyncContextManager[Any], name: str) -> None:
        self._transport = transport
        self._name = name
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] | None = None
        self._life: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Future[Any]] = set()

    async def start(self) -> Client:
        """Begin the session, and wait for the server's introduction.

        Raises:
            SessionClosed: the session did not begin; the message says why.
            AgentFlyError: raised by the transport.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(self._ready), name=self._name)
        self._life.add_done_callback(lambda life: life.cancelled() or life.exception())  # callers get the error
        waited: list[asyncio.Future[Any]] = [self._ready, self._life]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        raise self._failure()

    @property
    def over(self) -> bool:
        """Whether it has ended, or has not begun."""
        return self._life is None or self._life.done()

    async def request(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """Return the answer of the server.

        Raises:
            SessionClosed: the session is over, or ended during the request.
            Exception: raised by the request.
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
        """End the session once its requests are answered, or after this many seconds."""
        if self._asking:
            await asyncio.wait({*self._asking}, timeout=within_s)
        await self.stop(within_s)

    async def stop(self, within_s: float) -> None:
        """End the session, in good order if there is time, and otherwise by force."""
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
            asking.exception()  # the caller may be gone

    def _failure(self) -> Exception:
        """Why it is over."""
        life = self._life
        if life is None or not life.done():
            return SessionClosed("it has not begun")
        if life.cancelled():
            return SessionClosed("it was ended")
        error = _innermost(life.exception())
        if isinstance(error, AgentFlyError):
            return error
        failure = SessionClosed("it was ended" if error is None else describe_error(error))
        failure.__cause__ = error
        return failure


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_CLOSED = "Connection closed"  # the package's message for requests over an ended session


class SessionExpired(Exception):
    """The server has forgotten the session, with what earlier calls have left in it."""


class ReconnectingSession:
    """A connection to a server for concurrent requests.

    Attributes:
        tools: the server's tools.
        unreachable: whether the last request found no server.

    Args:
        transport: transports the messages of a session; called for each session.
        spec: the server.
        name: name of the server, for messages.
    """

    def __init__(
        self, transport: Callable[[], AbstractAsyncContextManager[Any]], spec: MCPServerSpec, name: str
    ) -> None:
        self.tools: tuple[Tool, ...] = ()
        self.unreachable = False
        self._transport = transport
        self._spec = spec
        self._name = name
        self._session = MCPSession(transport(), f"session of {name}")
        self._has_answered = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._closing_sessions: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin the session, and learn which tools there are.

        Raises:
            SessionClosed: the session failed; the message says why.
            EndlessToolListing: the tools cannot be listed.
            AgentFlyError: any error of the transport.
            Exception: any error of the client.
        """
        await self._session.start()
        self.tools = await self._session.request(list_all_tools)

    @property
    def closed(self) -> bool:
        """Whether no more requests are possible."""
        return self._session.over

    async def ping(self) -> None:
        """Make the cheapest request that the server's version of the protocol allows.

        Raises:
            Exception: it does not.
        """
        await self._session.request(_greet)

    async def ask(self, request: Callable[[Client], Awaitable[T]], *, keeps_state: bool) -> T:
        """Return the answer of the server.

        Args:
            request: makes the request with a client.
            keeps_state: whether calls leave state in a session, so that a new session cannot replace it.

        Raises:
            SessionClosed: the server is gone.
            SessionExpired: the server has forgotten the session, which has state.
            ToolError: the server rejects the call.
            ResourceError: there is no answer, or it violates the protocol.
        """
        session = self._session
        try:
            return await self._answer(session, request)
        except Exception as error:
            if transport_failure_of(error) is not TransportFailure.SESSION_LOST:
                raise self._failure(session, error) from error
        if keeps_state and self._has_answered:
            raise SessionExpired("it has forgotten the session, and with it what the calls before have done")
        await self._reconnected(session)
        session = self._session
        try:
            return await self._answer(session, request)
        except Exception as error:
            raise self._failure(session, error) from error

    async def close(self, grace_s: float) -> None:
        """End all sessions: in good order within this many seconds, and then by force."""
        going = [task for task in (self._reconnecting, *self._closing_sessions) if task is not None and not task.done()]
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going)
        await self._session.stop(grace_s)

    async def _answer(self, session: MCPSession, request: Callable[[Client], Awaitable[T]]) -> T:
        trouble: TransportFailure | None = None
        try:
            return await session.request(request)
        except Exception as error:
            trouble = transport_failure_of(error)
            raise
        finally:  # an abandoned request may have had its effect
            if session is self._session:
                self.unreachable = trouble is TransportFailure.UNREACHABLE
                self._has_answered = self._has_answered or trouble is not TransportFailure.SESSION_LOST

    def _failure(self, session: MCPSession, error: Exception) -> Exception:
        """Return the error of a failed request. A session that was replaced does not affect others."""
        closed = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
        if isinstance(error, SessionClosed) or (closed and (self._spec.command or error_message(error) == _CLOSED)):
            if session is self._session:
                return error if isinstance(error, SessionClosed) else SessionClosed(error_message(error))
            return ResourceError(f"{self._name} did not answer a call: its session has ended.")
        return to_agentfly_error(error, self._name, self._spec.tool_error_codes)

    async def _reconnected(self, session: MCPSession) -> None:
        """Replace a session that the server has forgotten. Overlapping requests share the new one."""
        if self._session is not session:
            return
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = asyncio.create_task(self._reconnect(session), name=f"new session of {self._name}")
            self._reconnecting.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # waiting callers get it
        await asyncio.shield(self._reconnecting)

    async def _reconnect(self, old: MCPSession) -> None:
        new = MCPSession(self._transport(), f"session of {self._name}")
        limit_s = self._spec.reset_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await new.start()
                tools = await new.request(list_all_tools)
        except Exception as error:
            await new.stop(limit_s / 4)
            why = f"within {limit_s:g} s" if isinstance(error, TimeoutError) else f"({error_message(error)})"
            raise SessionClosed(f"it has forgotten the session, and a new one could not be had {why}") from error
        except asyncio.CancelledError:
            await new.stop(limit_s / 4)
            raise
        self._session, self.tools, self._has_answered = new, tools, False
        retiring = asyncio.create_task(old.retire(self._spec.call_timeout_s))
        self._closing_sessions.add(retiring)
        retiring.add_done_callback(self._closing_sessions.discard)


async def _greet(client: Client) -> None:
    from mcp.types import EmptyResult, PingRequest

    if client.session.discover_result is not None:
        await client.session.send_discover(client.protocol_version)
    else:
        await client.session.send_request(PingRequest(), EmptyResult)

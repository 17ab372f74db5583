"""MCPServer: a live server of the Model Context Protocol, and what tools ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.errors import (
    PrerequisiteError,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    ToolError,
    UsageError,
    message_of,
    say,
)
from agentfly.installation import install_command
from agentfly.resources.keeping.kept_program import KeptProgram
from agentfly.resources.keeping.log import tail
from agentfly.resources.ledger import state_directory
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.resource import Resource, Status
from agentfly.resources.tree_removal import remove_tree
from agentfly.threads.pool import on_thread

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

    from agentfly.resources.mcp.session import Session

T = TypeVar("T")

_INSTANCE = re.compile(r"[\w.-]{1,100}")
_MOST_PAGES = 100
_TOLD_LOG = 4096
_TELLING_S = 5.0  # for telling why a start failed, before the engine's own limit ends it unheard
_LAST_WORDS_S = 1.0
_ENDS_ITSELF_S = 1.0  # what a program gets for ending because its input has, as the protocol wants it


class MCPServer(Resource):
    """A server of the Model Context Protocol: ``await server.call("search", {"query": "…"})``.

    Calls of one instance may overlap. A call that is given up is cancelled at the server too, as far as it obliges.
    """

    spec: MCPServerSpec

    def __init__(self, spec: MCPServerSpec, instance: str) -> None:
        super().__init__(spec, instance)
        if not _INSTANCE.fullmatch(instance) or instance in (".", ".."):
            raise UsageError(f"{instance!r} cannot be the name of a server: use letters, digits, '.', '_' and '-'.")
        self._session: Session | None = None
        self._program: KeptProgram | None = None
        self._tools: tuple[Tool, ...] = ()
        self._lost: str | None = "it has not been started."
        self._released = False
        self._calls = 0

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the program, or connect to the address, and learn which tools there are.

        Raises:
            PrerequisiteError: the package ``mcp`` is not installed, or a credential is not set.
            ResourceStartError: the server ended or did not answer; the message has the end of its log.
        """
        if self._released:
            raise ResourceDied(f"{self._name} has been released.")
        await on_thread(_require_package)  # its import takes a second
        if self.spec.command:
            self._directory.mkdir(parents=True, mode=0o700)
        limit = self.spec.start_timeout_s
        await self._begin(max(0.75 * limit, limit - _TELLING_S))

    async def reset(self) -> None:
        """Begin anew: with a new process, or a new session.

        Raises:
            ResourceStartError: that did not succeed.
            ResourceDied: it has been released.
        """
        if self._released:
            raise ResourceDied(f"{self._name} has been released.")
        self._lost = "it is being reset."
        await self._end(self.spec.reset_timeout_s / 3)
        await self._begin(self.spec.reset_timeout_s)

    async def status(self) -> Status:
        """Ask the server whether it is there, unless it has a call to answer: many do one thing at a time."""
        known = self.quick_status()
        if known is Status.BROKEN or self._calls or self._session is None:
            return known
        try:
            async with asyncio.timeout(self.spec.reset_timeout_s / 2):
                await self._session.ask(_greet)
        except Exception:
            return Status.BROKEN
        return Status.HEALTHY

    def quick_status(self) -> Status:
        """Say whether its program lives and its session goes on, as far as is known."""
        if self._lost is not None or self._session is None or self._session.over:
            return Status.BROKEN
        gone = self._program is not None and (self._program.ended or not self._directory.exists())
        return Status.BROKEN if gone else Status.HEALTHY

    async def release(self) -> None:
        """End the session and the program, by force after half of ``release_timeout_s``; return when all is gone."""
        self._released = True
        self._lost = "it was released."
        await self._end(self.spec.release_timeout_s / 4)
        await on_thread(remove_tree, self._directory)

    @property
    def traces(self) -> dict[str, Any]:
        """The directory that marks the program and whatever it starts, and the process that keeps them."""
        if not self.spec.command:
            return {}
        return {"directory": str(self._directory), **(self._program.traces if self._program is not None else {})}

    # --- what tools use ---------------------------------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        """The server's tools, as the package ``mcp`` describes them."""
        return self._tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call one of the server's tools.

        Returns:
            What the server answers. That the tool failed is said in it: ``is_error``.

        Raises:
            ToolError: the server refuses the call as it is: an unknown tool, arguments that do not fit.
            ResourceDied: the server is gone.
            ResourceError: it did not answer within ``call_timeout_s``, or not as the protocol wants it.
        """
        self._calls += 1
        try:
            async with asyncio.timeout(self.spec.call_timeout_s) as limit:
                return await self._ask(lambda client: client.call_tool(tool, dict(arguments)))
        except TimeoutError:
            if not limit.expired():
                raise
            raise ResourceError(
                f"{self._name} did not answer a call of {tool!r} within call_timeout_s={self.spec.call_timeout_s:g}. "
                "Where the model can cause that, say how long a tool may take: mcp_tools(…, timeout_s=…)."
            ) from None
        finally:
            self._calls -= 1

    def log(self, size: int = 2**16) -> str:
        """The end of what the program wrote to its standard error, in at most so many bytes."""
        from agentfly.resources.mcp.transports import log_file

        return tail(log_file(self._directory), size)

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _ask(self, request: Callable[[Client], Awaitable[T]]) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        from agentfly.resources.mcp.session import SessionOver

        if self._lost is not None or self._session is None:
            raise ResourceDied(f"{self._name} cannot be used: {self._lost}")
        try:
            return await self._session.ask(request)
        except SessionOver as error:
            raise await self._death(error) from error.__cause__
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._death(error) from error
            if error.code == REQUEST_TIMEOUT:
                raise ResourceError(f"{self._name} did not answer: {error.message}.") from error
            raise ToolError(error.message) from error
        except RuntimeError as error:  # what came back is not what the tool's own schema promises
            raise ResourceError(f"{self._name} does not keep to the protocol: {message_of(error)}") from error

    async def _death(self, error: Exception) -> ResourceDied:
        if self._released:
            return ResourceDied(f"{self._name} was released during a call.")
        how = await self._how_it_ended(message_of(error))
        self._lost = self._lost or f"it is gone ({how}).{self._last_words()}"
        return ResourceDied(f"{self._name} cannot be used: {self._lost}")

    async def _how_it_ended(self, otherwise: str) -> str:
        if self._program is not None and self._program.traces:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    return await self._program.wait()
        return otherwise

    def _last_words(self) -> str:
        if not self.spec.command:
            return ""
        end = self.log(_TOLD_LOG)
        return f" The end of its log:\n{end}" if end else " It wrote nothing to its log."

    def _cure_of_place(self) -> str:
        """What to do if the command names files by paths that are not absolute, and says not of which directory."""
        if self.spec.cwd:
            return ""
        here = [word for word in self.spec.command if not word.startswith("-") and Path(word).is_file()]
        relative = next((word for word in here if not Path(word).is_absolute()), None)
        if relative is None:
            return ""
        return (
            f"\n{relative!r} is looked for in a directory of the server's own, not in the one you are in: write its "
            f"absolute path, {str(Path(relative).resolve())!r}, or give cwd={str(Path.cwd())!r}."
        )

    # --- beginning and ending ---------------------------------------------------------------------------------------

    async def _begin(self, limit_s: float) -> None:
        from agentfly.resources.mcp.session import Session, SessionOver

        self._program = KeptProgram() if self.spec.command else None
        session = self._session = Session(self._transport(), f"session of {self.instance}")
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await session.start()
                self._tools = await session.ask(_all_tools)
        except PrerequisiteError:
            raise
        except Exception as error:
            if limit.expired():
                why = f"it did not answer within {limit_s:g} s"
            else:
                why = await self._how_it_ended(message_of(error) if isinstance(error, SessionOver) else say(error))
            told = f"{self._name} did not start: {why}.{self._last_words()}{self._cure_of_place()}"
            raise ResourceStartError(told) from error
        if not self._released:
            self._lost = None

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        from agentfly.resources.mcp import transports

        if self._program is not None:
            return transports.of_program(self.spec, self._program, self._directory)
        return transports.of_address(self.spec)

    async def _end(self, grace_s: float) -> None:
        if self._session is not None:
            await self._session.stop(grace_s)
        if self._program is not None:
            if not self._program.ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(grace_s, _ENDS_ITSELF_S)):
                        await self._program.wait()
            await self._program.stop(grace_s)

    @cached_property
    def _directory(self) -> Path:
        return state_directory().resolve() / "mcp-servers" / self.instance

    @property
    def _name(self) -> str:
        return f"{self.spec.label} {self.instance}"


async def _greet(client: Client) -> None:
    """Have the server answer something, as cheaply as its version of the protocol allows."""
    from mcp.types import EmptyResult, PingRequest

    if client.session.discover_result is not None:
        await client.session.send_discover(client.protocol_version)
    else:
        await client.session.send_request(PingRequest(), EmptyResult)


async def _all_tools(client: Client) -> tuple[Tool, ...]:
    if client.server_capabilities.tools is None:
        return ()
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if not (cursor := page.next_cursor):
            break
    return tuple(tools)


def _require_package() -> None:
    try:
        import mcp.client.client  # noqa: F401
    except ImportError as error:
        raise PrerequisiteError(
            f"Servers of the Model Context Protocol need the package mcp, version 2 ({error}): "
            f"{install_command('mcp')}."
        ) from error

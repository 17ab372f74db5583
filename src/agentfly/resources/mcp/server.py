"""MCPServer: a live server of the Model Context Protocol, as tools use it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentfly.core.errors import (
    PrerequisiteError,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    UsageError,
    describe_error,
    error_message,
)
from agentfly.core.installation import install_command
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.core.user_directories import state_directory
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.process.supervised import SupervisedProgram
from agentfly.resources.process.supervisor import log_tail
from agentfly.resources.resource import Resource, Status

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

    from agentfly.resources.mcp.client import ReconnectingSession

T = TypeVar("T")

_INSTANCE = re.compile(r"[\w.-]{1,100}")
_TOLD_LOG = 4096
_TELLING_S = 5.0  # for telling why a start failed, before the engine's own limit ends it unheard
_LAST_WORDS_S = 1.0
_ENDS_ITSELF_S = 1.0  # what a program gets for ending because its input has, as the protocol wants it


class MCPServer(Resource):
    """A server of the Model Context Protocol: ``await server.call("search", {"query": "…"})``.

    Calls of one instance may overlap. An abandoned call is cancelled at the server, too, if the server supports it.
    """

    spec: MCPServerSpec

    def __init__(self, spec: MCPServerSpec, instance: str) -> None:
        super().__init__(spec, instance)
        if not _INSTANCE.fullmatch(instance) or instance in (".", ".."):
            raise UsageError(f"{instance!r} cannot be the name of a server: use letters, digits, '.', '_' and '-'.")
        self._connection: ReconnectingSession | None = None
        self._program: SupervisedProgram | None = None
        self._dead_reason: str | None = "it has not been started."
        self._released = False
        self._protocol_errors: list[str] = []
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
        await run_in_thread(_require_package)  # the import takes a second
        if self.spec.command:
            self._directory.mkdir(parents=True, mode=0o700)
        limit = self.spec.start_timeout_s
        await self._begin(max(0.75 * limit, limit - _TELLING_S))

    async def reset(self) -> None:
        """Start a new process, or a new session.

        Raises:
            ResourceStartError: the start failed.
            ResourceDied: the server was released.
        """
        if self._released:
            raise ResourceDied(f"{self._name} has been released.")
        self._dead_reason = "it is being reset."
        await self._end(self.spec.reset_timeout_s / 3)
        await self._begin(self.spec.reset_timeout_s)

    async def status(self) -> Status:
        """Check that the server responds, unless a call is running: many servers do one thing at a time."""
        known = self.quick_status()
        if known is Status.BROKEN or self._calls or self._connection is None:
            return known
        try:
            async with asyncio.timeout(self.spec.reset_timeout_s / 2):
                await self._connection.ping()
        except Exception:
            return Status.BROKEN
        return Status.HEALTHY

    def quick_status(self) -> Status:
        """Report whether its program and session are alive, as far as known."""
        connection = self._connection
        if self._dead_reason is not None or connection is None or connection.closed or connection.unreachable:
            return Status.BROKEN
        gone = self._program is not None and (self._program.ended or not self._directory.exists())
        return Status.BROKEN if gone else Status.HEALTHY

    async def release(self) -> None:
        """End the session and the program, by force after half of ``release_timeout_s``; return when all is gone."""
        self._released = True
        self._dead_reason = "it was released."
        await self._end(self.spec.release_timeout_s / 4)
        await run_in_thread(remove_tree, self._directory)

    @property
    def traces(self) -> dict[str, Any]:
        """The directory that marks the program and its descendants, and the ids of their supervisor."""
        if not self.spec.command:
            return {}
        return {"directory": str(self._directory), **(self._program.traces if self._program is not None else {})}

    # --- what tools use ---------------------------------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        """The server's tools, as the package ``mcp`` describes them."""
        return self._connection.tools if self._connection is not None else ()

    async def call(self, tool: str, arguments: Mapping[str, Any], *, keeps_state: bool = True) -> CallToolResult:
        """Call one of the server's tools.

        A server at an address may forget its sessions, for instance after a restart. The call then continues in a new
        session, unless an earlier call left state in the old one.

        Args:
            tool: the tool's name on the server.
            arguments: its arguments, by name.
            keeps_state: whether calls leave state in the session that later calls need.

        Returns:
            The server's answer. Its ``is_error`` says whether the tool failed.

        Raises:
            ToolError: the server rejects the call: an unknown tool, or arguments that do not fit.
            ResourceDied: the server is gone, or the session with the state of earlier calls.
            ResourceError: there was no answer within ``call_timeout_s``, the answer violates the protocol, or HTTP
                reports an error that is not about the call.
        """
        self._calls += 1
        try:
            async with asyncio.timeout(self.spec.call_timeout_s) as limit:
                return await self._ask(lambda client: client.call_tool(tool, dict(arguments)), keeps_state=keeps_state)
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
        """Return the end of the program's standard error, at most this many bytes."""
        from agentfly.resources.mcp.transports import log_file

        return log_tail(log_file(self._directory), size)

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _ask(self, request: Callable[[Client], Awaitable[T]], *, keeps_state: bool) -> T:
        from agentfly.resources.mcp.client import SessionClosed, SessionExpired

        if self._dead_reason is not None or self._connection is None:
            raise ResourceDied(f"{self._name} cannot be used: {self._dead_reason}")
        try:
            return await self._connection.ask(request, keeps_state=keeps_state)
        except SessionClosed as error:
            raise await self._died_error(error) from error.__cause__
        except SessionExpired as error:
            self._dead_reason = self._dead_reason or f"{error}."
            raise ResourceDied(f"{self._name} cannot be used: {self._dead_reason}") from error

    async def _died_error(self, error: Exception) -> ResourceDied:
        if self._released:
            return ResourceDied(f"{self._name} was released during a call.")
        how = await self._exit_reason(error)
        self._dead_reason = self._dead_reason or f"it is gone ({how}).{self._last_words()}"
        return ResourceDied(f"{self._name} cannot be used: {self._dead_reason}")

    async def _exit_reason(self, error: Exception) -> str:
        from agentfly.resources.mcp.client import EndlessToolListing, SessionClosed

        if self._protocol_errors:
            return self._protocol_errors[0]
        if self._program is not None and self._program.traces:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    return await self._program.wait_exit()
        return error_message(error) if isinstance(error, (SessionClosed, EndlessToolListing)) else describe_error(error)

    def _last_words(self) -> str:
        if not self.spec.command:
            return ""
        end = self.log(_TOLD_LOG)
        return f" The end of its log:\n{end}" if end else " It wrote nothing to its log."

    def _relative_path_advice(self) -> str:
        """Return advice if the command has relative file paths and no directory for them."""
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
        from agentfly.resources.mcp.client import ReconnectingSession

        self._program = SupervisedProgram() if self.spec.command else None
        self._protocol_errors = []
        self._connection = ReconnectingSession(self._transport, self.spec, self._name)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await self._connection.open()
        except PrerequisiteError:
            raise
        except Exception as error:
            if limit.expired():
                why = f"it did not answer within {limit_s:g} s"
            else:
                why = await self._exit_reason(error)
            told = f"{self._name} did not start: {why}.{self._last_words()}{self._relative_path_advice()}"
            raise ResourceStartError(told) from error
        if not self._released:
            self._dead_reason = None

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        from agentfly.resources.mcp import transports

        if self._program is not None:
            return transports.stdio_transport(self.spec, self._program, self._directory, self._protocol_errors)
        return transports.http_transport(self.spec)

    async def _end(self, grace_s: float) -> None:
        if self._connection is not None:
            await self._connection.close(grace_s)
        if self._program is not None:
            if not self._program.ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(grace_s, _ENDS_ITSELF_S)):
                        await self._program.wait_exit()
            await self._program.stop(grace_s)

    @cached_property
    def _directory(self) -> Path:
        return state_directory().resolve() / "mcp-servers" / self.instance

    @property
    def _name(self) -> str:
        return f"{self.spec.label} {self.instance}"


def _require_package() -> None:
    try:
        import mcp.client.client  # noqa: F401
    except ImportError as error:
        raise PrerequisiteError(
            f"Servers of the Model Context Protocol need the package mcp, version 2 ({error}): "
            f"{install_command('mcp')}."
        ) from error

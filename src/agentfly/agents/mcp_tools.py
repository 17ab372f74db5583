"""Tools of servers of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentfly.agents.tool import MAX_OUTPUT_TOKENS, Tool, ToolSettings, require_name
from agentfly.agents.tool_result import ToolResult
from agentfly.agents.tool_schema import JSONSchemaArguments
from agentfly.agents.user_function import MISSING, Parameter, ParameterSource
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, ResourceError, ToolError, suggest_name
from agentfly.core.messages import Image
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.resource import Scope

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as Listed


logger = logging.getLogger(__name__)

_SLOW_START_S = 0.2
"""Duration in seconds from which the start of a server is reported as slow."""


def mcp_tools(
    spec: MCPServerSpec,
    *,
    only: Iterable[str] | None = None,
    prefix: str = "",
    scope: Scope | str = Scope.ROLLOUT,
    timeout_s: float | None = None,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    retries: int = 0,
) -> list[Tool]:
    """Return the tools of a Model Context Protocol server, for ``Agent(tools=[*mcp_tools(SPEC)])``.

    The call starts or contacts the server once, lists its tools, and stops it again. In a rollout the server is a
    resource like any other: acquired at the first call, and released at the end of the rollout. A warning reports a
    slow start where each rollout pays for one.

    Errors that the server reports for a tool are shown to the model. A server that dies, is unreachable or violates the
    protocol is an infrastructure failure. If a remote server has lost a session, the call is repeated in a new session
    where no state is lost: with scope ``rollout`` only at the first call.

    Texts and images become the observation. Structured content is in the record's ``info`` under ``structured``. Other
    content, such as audio, is replaced by a description.

    Args:
        spec: the server.
        only: names of the tools to take; None for all.
        prefix: prefix of the tools' names, to distinguish the tools of two servers. Invalid characters of a name become
            ``_``.
        scope: ``rollout`` for one server per rollout; ``global`` for a shared one, if it keeps no state; ``call`` for a
            new one at each call.
        timeout_s: as in `agentfly.tool`.
        max_output_tokens: as in `agentfly.tool`.
        retries: as in `agentfly.tool`.

    Raises:
        ConfigError: the server has no tool with a name in ``only``, or two with the same resulting name; or an argument
            has the wrong type.
        ToolDefinitionError: a tool's name or schema, or a setting, is invalid.
        ResourceError, PrerequisiteError: the server could not list its tools.
    """
    if not isinstance(spec, MCPServerSpec):
        raise ConfigError(
            f"mcp_tools({spec!r:.100}): it takes the spec of a server. Write mcp_tools(af.MCPServerSpec(command=("
            "'uvx', 'the-server'))), or give its url."
        )
    if only is not None and (isinstance(only, str) or not isinstance(only, Iterable)):
        raise ConfigError(f"mcp_tools(only={only!r:.100}): write a list of names, [{only!r:.100}], or None for all.")
    if not isinstance(prefix, str):
        raise ConfigError(f"mcp_tools(prefix={prefix!r:.100}): it must be a text.")
    scope = Scope(scope)
    settings = ToolSettings(timeout_s=timeout_s, max_output_tokens=max_output_tokens, retries=retries)
    settings.check(spec.label)
    answered, seconds = THREAD_POOL.submit(_ask, spec).result()
    listed = _chosen(spec, answered, only)
    if scope is not Scope.GLOBAL and seconds >= _SLOW_START_S:
        logger.warning(
            "Each %s starts a new %s, which took %.1f s. If the server keeps no state of a rollout, share one among "
            "all rollouts: mcp_tools(…, scope='global').",
            "rollout" if scope is Scope.ROLLOUT else "call",
            spec.label,
            seconds,
        )
    tools = [_tool(spec, one, prefix, scope, settings) for one in listed]
    names = [tool.name for tool in tools]
    for one, name in zip(listed, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"Two tools of {spec.label} would be called {name!r}; one is {one.name!r}. Use only=….")
    return tools


@dataclass(frozen=True)
class MCPToolFunction:
    """Calls one tool of a server on behalf of a rollout.

    Attributes:
        spec: the server.
        tool: the tool's name there.
        scope: scope of the server's lease.
    """

    spec: MCPServerSpec
    tool: str
    scope: Scope

    async def __call__(self, arguments: dict[str, Any], context: Context) -> ToolResult:
        """Call the tool and return its result.

        Raises:
            ToolError: the server reports that the tool failed.
        """
        server = await context.acquire(self.spec, scope=self.scope)
        keeps_state = self.scope is Scope.ROLLOUT  # what is shared, or fresh, keeps nothing of this rollout
        return _as_result(await server.call(self.tool, arguments, keeps_state=keeps_state))


def _ask(spec: MCPServerSpec) -> tuple[Sequence[Listed], float]:
    """Return the tools of a server, and the duration of its start in seconds."""

    async def ask() -> tuple[Sequence[Listed], float]:
        async with ResourceEngine() as engine:
            started = time.perf_counter()
            lease = await engine.acquire(replace(spec, capacity=1, warm=0, replicas=1), "mcp_tools")
            return lease.resource.tools, time.perf_counter() - started

    return asyncio.run(ask())


def _chosen(spec: MCPServerSpec, listed: Sequence[Listed], only: Iterable[str] | None) -> list[Listed]:
    if only is None:
        return list(listed)
    wanted, known = list(only), {one.name: one for one in listed}
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{spec.label} has no tool {name!r}. {suggest_name(name, known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def _tool(spec: MCPServerSpec, listed: Listed, prefix: str, scope: Scope, settings: ToolSettings) -> Tool:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{prefix}{listed.name}")
    require_name(name)
    settings.check(name)
    return Tool(
        MCPToolFunction(spec, listed.name, scope),
        name,
        (listed.description or listed.title or f"The tool {listed.name} of {spec.label}.").strip(),
        JSONSchemaArguments(name, listed.input_schema),
        (Parameter("context", Context, MISSING, ParameterSource.CONTEXT),),
        settings.timeout_s,
        settings.max_output_tokens,
        settings.retries,
        resources=(spec,) if scope is Scope.ROLLOUT else (),
    )


def _as_result(answer: CallToolResult) -> ToolResult:
    """Convert a server's answer to a tool result.

    Raises:
        ToolError: the answer reports that the tool failed.
        ResourceError: the answer violates the protocol.
    """
    if answer.is_error:
        words = "\n".join(block.text for block in answer.content if block.type == "text")
        raise ToolError(words or "The tool failed and does not say why.")
    shown = [_shown(block) for block in answer.content]
    structured = answer.structured_content
    if not shown and structured is not None:
        return ToolResult(structured, info={"structured": structured})
    info = {} if structured is None else {"structured": structured}
    if all(isinstance(part, str) for part in shown):
        return ToolResult("\n".join(map(str, shown)), info=info)
    return ToolResult(shown, info=info)


def _shown(block: ContentBlock) -> str | Image:
    """Convert one part of an answer to text or an image."""
    match block.type:
        case "text":
            return block.text
        case "image":
            return _image(block.data, block.mime_type)
        case "audio":
            return f"[audio, {block.mime_type}, which cannot be shown]"
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
    resource = block.resource
    text = getattr(resource, "text", None)
    if text is not None:
        return str(text)
    kind = resource.mime_type or "of unknown type"
    if kind.startswith("image/"):
        return _image(getattr(resource, "blob", ""), kind)
    return f"[{resource.uri}, {kind}, which cannot be shown]"


def _image(written: str, kind: str) -> str | Image:
    if not kind.startswith("image/"):
        return f"[image, {kind}, which cannot be shown]"
    try:
        return Image(base64.b64decode("".join(written.split()), validate=True), kind)
    except ValueError as error:
        raise ResourceError(f"The answer of an MCP server holds an image that is no base64: {error}.") from error

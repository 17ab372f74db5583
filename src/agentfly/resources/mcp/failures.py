"""Failures of calls: which of them the model can have caused, and which are the server's or the network's."""

from __future__ import annotations

from collections.abc import Collection

from mcp import MCPError
from mcp.types import REQUEST_TIMEOUT

from agentfly.errors import AgentFlyError, ResourceError, ToolError, message_of, say
from agentfly.resources.mcp.http_client import trouble_in

_RESERVED = range(-32768, -31999)  # by JSON-RPC 2.0, section 5.1
_SAID = 1000  # characters


def failure_of(error: Exception, name: str, tool_error_codes: Collection[int]) -> AgentFlyError:
    """What a call failed with.

    The model is told of errors that the server makes of a call. Whatever HTTP says, and whatever is no message of the
    protocol, is infrastructure.

    Args:
        error: what the client raised.
        name: what the server is called.
        tool_error_codes: which of the reserved codes say that a call was wrong.
    """
    if isinstance(error, AgentFlyError):
        return error
    said = message_of(error)[:_SAID]
    if not isinstance(error, MCPError):
        told = said if isinstance(error, RuntimeError) else say(error)[:_SAID]
        return ResourceError(f"{name} does not keep to the protocol: {told}")
    if trouble_in(error) or error.code == REQUEST_TIMEOUT:
        return ResourceError(f"{name} did not answer a call: {said}.")
    if error.code in _RESERVED and error.code not in tool_error_codes:
        return ResourceError(
            f"{name} could not answer a call: {said} (code {error.code}). If it says so of what a model can cause, "
            f"list the code: MCPServerSpec(tool_error_codes={(*tool_error_codes, error.code)})."
        )
    return ToolError(said)

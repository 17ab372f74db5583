"""The model's own way of writing tool calls."""

from __future__ import annotations

from typing import Any

from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer

_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe_of_tools", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def own_format(tokenizer: Tokenizer) -> ToolCallFormat:
    """The format of a model: described by its template where that describes tools, and by a system message if not."""
    return HermesFormat(in_template=_describes_tools(tokenizer))


def _describes_tools(tokenizer: Tokenizer) -> bool:
    question: list[Message] = [{"role": "user", "content": "question"}]
    try:
        return "probe_of_tools" in tokenizer.render(question, tools=[_PROBE])
    except ChatFormatError:
        return False

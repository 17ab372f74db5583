"""HermesForAll: tool calls for models whose chat template knows neither tools nor their results."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.messages import Message, ToolCall


@dataclass(frozen=True)
class HermesForAll(HermesFormat):
    """The Hermes format with results in messages of the user, between tags, which every chat template can write.

    The tools are described in the system message if there is one, and otherwise before the user's first words.
    """

    @property
    def name(self) -> str:
        """The name of the format."""
        return "hermes_for_all"

    def result(self, call: ToolCall, observation: str) -> Message:
        """A message of the user that holds the result."""
        return {"role": "user", "content": f"<tool_response>\n{observation}\n</tool_response>"}

"""ModelFormat: the model's own tool-call format, whichever that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.agents.tool import Tool
from agentfly.agents.toolcalls.format import message_with_calls, tool_message
from agentfly.errors import ConfigError
from agentfly.messages import Message, ToolCall


@dataclass(frozen=True)
class ModelFormat:
    """What an agent asks for by ``"model"``: the format that its model was trained on.

    Where the model's chat format reads calls itself, nothing more is needed: it describes the tools and hands over the
    calls. Otherwise `agentfly.agents.toolcalls.registry.format_for` puts the format that the model's chat template
    speaks of in its place. By itself it knows no text.
    """

    in_template = True

    @property
    def name(self) -> str:
        """The name by which an agent asks for the format."""
        return "model"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Nothing: the chat template describes the tools."""
        return ""

    def parse(self, text: str, tools: Sequence[Tool], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """Not known without the model.

        Raises:
            ConfigError: always.
        """
        raise self._unknown()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Not known without the model.

        Raises:
            ConfigError: always.
        """
        raise self._unknown()

    def said(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """The calls as ``tool_calls``, and ``text``, which holds none of them any more."""
        readable = [call for call in calls if call.arguments is not None]
        return message_with_calls(text, readable) if readable else {"role": "assistant", "content": text}

    def result(self, call: ToolCall, observation: str) -> Message:
        """A message of role ``tool`` that names the call it answers."""
        return tool_message(call, observation)

    def _unknown(self) -> ConfigError:
        return ConfigError(
            "tool_call_format='model' stands for the model's own format, which is known once the model is. Name the "
            "format itself to read or write its text, for instance 'hermes'."
        )

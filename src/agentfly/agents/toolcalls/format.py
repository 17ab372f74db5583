"""ToolCallFormat: how a model writes tool calls as text, and how they are read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentfly.messages import Message, ToolCall

if TYPE_CHECKING:
    from agentfly.agents.tool import Tool


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What the text of a turn says.

    Attributes:
        content: the text outside the calls.
        calls: the calls in order, each with an id unique in the rollout; malformed ones carry an error.
    """

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallFormat(Protocol):
    """One way of writing tool calls as text."""

    name: str

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system prompt says about the tools and how to call them."""
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedTurn:
        """Read a turn's text. Never raises for any text: a malformed call is a `ToolCall` with an error."""
        ...

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call, as the model should write it: for examples, oracles and scripted policies."""
        ...

    def result(self, call: ToolCall, observation: str) -> Message:
        """The message that hands a call's observation to the model."""
        ...

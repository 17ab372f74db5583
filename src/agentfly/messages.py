"""Chat messages and tool calls as plain values, shared by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]


class Message(TypedDict):
    """One message of a chat, in the shape that chat templates read."""

    role: Role
    content: str
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for, as it was parsed.

    ``arguments`` is None, and ``error`` says why, when the text was recognisably a call but could not be parsed;
    such a call is never executed: its error becomes the observation.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None = field(default_factory=dict)
    error: str | None = None

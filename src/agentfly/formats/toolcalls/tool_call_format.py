"""ToolCallFormat: how a model writes tool calls as text, and how they are read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentfly.core.messages import TOOL_NAME, Message, ToolCall

if TYPE_CHECKING:
    from agentfly.agents.tool import Tool


@runtime_checkable
class ToolCallFormat(Protocol):
    """One way of writing tool calls as text. A user's own is a class with these members."""

    @property
    def name(self) -> str:
        """The name by which an agent asks for the format."""
        ...

    @property
    def uses_chat_template(self) -> bool:
        """Whether the model's own chat template describes the tools and writes the calls, so that no one else need."""
        ...

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system prompt says about the tools and how to call them."""
        ...

    def parse(self, text: str, tools: Sequence[Tool], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """The calls in a turn's text, in order. Never raises for any text: a malformed call carries an error.

        Args:
            text: the text of one turn, without its end-of-turn token. Where the prompt had opened thinking, it begins
                with the marker that opens it, for instance ``<think>``, and a closing marker ends it.
            tools: the tools that the agent has.
            first_call: number of the first call; the calls of a rollout are numbered through, so that ids are unique.
        """
        ...

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call, as the model should write it: for examples, oracles and scripted policies."""
        ...

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """The message that stands for a turn of the model in the conversation.

        Where the chat template writes the calls (`uses_chat_template`), that is what was said without them, with the calls as
        ``tool_calls``; otherwise, and where a call is malformed, the text as it stands.

        Args:
            text: the text of the turn.
            calls: the calls that `parse` found in it; none in a turn that a limit cut.
        """
        ...

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """The message that hands a call's observation to the model."""
        ...


def behind(opened: str, text: str) -> str:
    """A turn's text as formats read it: behind the marker by which the prompt had opened thinking, if it had."""
    return f"{opened}\n{text}" if opened else text


def said_behind(opened: str, by: ToolCallFormat, text: str, calls: Sequence[ToolCall]) -> Message:
    """What `ToolCallFormat.said` makes of a turn before which the prompt had opened thinking by ``opened``, if it had.

    The marker is of the prompt, so it is no part of the message.
    """
    message = by.assistant_message(behind(opened, text), calls)
    content = message["content"]
    if opened and isinstance(content, str) and content.startswith(opened):
        return {**message, "content": content.removeprefix(opened).removeprefix("\n")}
    return message


def message_with_calls(content: str, calls: Sequence[ToolCall]) -> Message:
    """A turn of the model whose calls stand in ``tool_calls``, and no longer in its text. None may be malformed."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }


def tool_message(call: ToolCall, observation: str) -> Message:
    """A message of role ``tool`` that names the call it answers, and the tool unless none can be called that."""
    message: Message = {"role": "tool", "content": observation, "tool_call_id": call.id}
    if TOOL_NAME.fullmatch(call.name):
        message["name"] = call.name
    return message


def call_id(number: int) -> str:
    """The id of a rollout's call with this number: the same in every replay of the rollout."""
    return f"call_{number}"

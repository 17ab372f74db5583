"""ToolCallFormat: how a model writes tool calls as text, and how they are parsed. ToolDescription: a format's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentfly.core.messages import TOOL_NAME, Message, ToolCall


class ArgumentDescription(Protocol):
    """One argument of a tool."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def description(self) -> str:
        """Its description; empty if there is none."""
        ...

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        ...


class ArgumentsDescription(Protocol):
    """The arguments of a tool."""

    @property
    def arguments(self) -> Sequence[ArgumentDescription]:
        """The arguments, in order."""
        ...

    def type_of(self, name: str) -> str:
        """Describe the type of an argument in JSON's terms."""
        ...


class ToolDescription(Protocol):
    """The part of a tool that formats need: its name, description and arguments."""

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        ...

    @property
    def description(self) -> str:
        """The tool's description."""
        ...

    @property
    def schema(self) -> ArgumentsDescription:
        """Its arguments."""
        ...

    @property
    def definition(self) -> Mapping[str, Any]:
        """Its definition for chat templates and model APIs."""
        ...


@runtime_checkable
class ToolCallFormat(Protocol):
    """One way of writing tool calls as text. Users can write their own: a class with these members."""

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        ...

    @property
    def uses_chat_template(self) -> bool:
        """Whether the model's chat template describes the tools and writes the calls."""
        ...

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Return the text for the system prompt: the tools, and how to call them."""
        ...

    def parse(self, text: str, tools: Sequence[ToolDescription], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """Parse the calls in a turn's text, in order. Never raises for any text: a malformed call has an error.

        Args:
            text: the text of one turn, without its end-of-turn token. If the prompt opened reasoning, the text begins
                with the opening marker, for instance ``<think>``, and a closing marker ends the reasoning.
            tools: the agent's tools.
            first_call: number of the first call. Calls are numbered throughout a rollout, so that ids are unique.
        """
        ...

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call as the model should write it: for examples, oracles and scripted policies."""
        ...

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return the conversation message for a turn of the model.

        If the chat template writes the calls (`uses_chat_template`), the message has the text without calls, and the
        calls as ``tool_calls``. Otherwise, or if a call is malformed, it has the unchanged text.

        Args:
            text: the text of the turn.
            calls: the calls that `parse` found in it; none in a turn that a token limit ended.
        """
        ...

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return the message that shows a call's observation to the model."""
        ...


def with_opening_marker(opened: str, text: str) -> str:
    """Return a turn's text as formats read it: after the marker with which the prompt opened reasoning, if any."""
    return f"{opened}\n{text}" if opened else text


def message_of_turn(opened: str, call_format: ToolCallFormat, text: str, calls: Sequence[ToolCall]) -> Message:
    """Return `ToolCallFormat.assistant_message` of a turn, for which the prompt may have opened reasoning.

    The opening marker belongs to the prompt, so it is not part of the message.
    """
    message = call_format.assistant_message(with_opening_marker(opened, text), calls)
    content = message["content"]
    if opened and isinstance(content, str) and content.startswith(opened):
        return {**message, "content": content.removeprefix(opened).removeprefix("\n")}
    return message


def message_with_calls(content: str, calls: Sequence[ToolCall]) -> Message:
    """Return a message with the calls in ``tool_calls`` and not in its text. No call may be malformed."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }


def tool_message(call: ToolCall, observation: str) -> Message:
    """Return a message of role ``tool`` with the call's id, and with the tool's name if that is valid."""
    message: Message = {"role": "tool", "content": observation, "tool_call_id": call.id}
    if TOOL_NAME.fullmatch(call.name):
        message["name"] = call.name
    return message


def call_id(number: int) -> str:
    """Return the id of a rollout's call with this number. It is the same in every replay of the rollout."""
    return f"call_{number}"

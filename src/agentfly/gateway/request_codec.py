"""Conversion between a program's conversations and the model's tokens, including tools that the program runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Message, PlacedImage, Role, ToolCall, concat_content, image_parts, images_of, text_of
from agentfly.formats.chat.chat_format import ChatFormat, History, RenderedTokens, ToolDefinitions
from agentfly.formats.chat.prefix_stability import ANSWER_EXCHANGE, ProbeExchange
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.formats.toolcalls.hermes import HermesFormat, HermesUserResultFormat
from agentfly.formats.toolcalls.registry import detect_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat, call_id, message_with_calls, with_opening_marker
from agentfly.gateway.limits import UnsupportedValue, count_chars
from agentfly.gateway.model_request import ModelRequest
from agentfly.policies.policy import Generation, Tokenizer


@dataclass(frozen=True)
class ProgramArgument:
    """One argument that the model gives."""

    name: str
    required: bool
    description: str


@dataclass(frozen=True)
class ProgramSchema:
    """The arguments of a program's tool, from its JSON schema."""

    json_schema: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[ProgramArgument, ...]:
        """The arguments, in order."""
        required = self.json_schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
        return tuple(
            ProgramArgument(name, name in needed, str(self._about(name).get("description") or ""))
            for name in self.json_schema.get("properties") or {}
        )

    def type_of(self, name: str) -> str:
        """The type of an argument, in a word."""
        kind = self._about(name).get("type", "any")
        return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)

    def _about(self, name: str) -> Mapping[str, Any]:
        """The schema of an argument. One of ``true`` takes any value."""
        about = (self.json_schema.get("properties") or {}).get(name)
        return about if isinstance(about, Mapping) else {}


@dataclass(frozen=True, repr=False)
class ProgramTool:
    """A tool of a program.

    Attributes:
        name: what the model calls it.
        description: what it does.
        definition: the tool as chat templates want it described.
    """

    name: str
    description: str
    definition: Mapping[str, Any]

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Self:
        """The tool of a definition, which has been checked."""
        function = definition["function"]
        return cls(function["name"], str(function.get("description") or ""), definition)

    def __repr__(self) -> str:
        return f"<tool {self.name:.100}>"

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        parameters: Mapping[str, Any] = self.definition["function"].get("parameters") or {"type": "object"}
        return parameters

    @property
    def schema(self) -> ProgramSchema:
        """Its arguments."""
        return ProgramSchema(self.parameters)


@dataclass(frozen=True)
class ModelAnswer:
    """An answer of the model as the program is given it.

    Attributes:
        message: the answer as it stands in the program's conversation.
        text: everything that was sampled, without the control token at its end.
        calls: the tool calls in it.
        generation: what was sampled, up to where it was stopped.
    """

    message: Message
    text: str
    calls: tuple[ToolCall, ...]
    generation: Generation


EXPECTED_MAX_TURNS = 200
"""The most turns that a program\'s conversation is expected to have."""


class RequestCodec:
    """Renders conversations with tools for a model, and reads its answers.

    Args:
        chat: the model's chat format.
        calls: the tool-call format. With ``uses_chat_template``, the model's template describes the tools and writes
            the calls. Otherwise a system message describes them, and calls and results are plain text.
        no_tools: the reason why the chat format does not support tools; None if it does.
    """

    def __init__(self, chat: ChatFormat, calls: ToolCallFormat, no_tools: ChatFormatError | None = None) -> None:
        self.chat = chat
        self._calls = calls
        self._no_tools = no_tools

    @classmethod
    def of(cls, tokenizer: Tokenizer, calls: ToolCallFormat | None, *, history: History) -> RequestCodec:
        """The codec of a model, proved for conversations with and without tools.

        Args:
            tokenizer: the model's.
            calls: the tool-call format; if not given, the model's own, or else one that its chat template can write.
            history: what to do where the chat template writes the past differently once a conversation has gone on.

        Raises:
            ChatFormatError: the chat template cannot carry conversations even without tools.
        """
        plain = TemplateChatFormat(tokenizer, [ANSWER_EXCHANGE], history=history, longest=EXPECTED_MAX_TURNS)
        refusal: ChatFormatError | None = None
        for candidate in (calls,) if calls is not None else (_own_format(tokenizer), HermesUserResultFormat()):
            tools = [_PROBE_TOOL] if candidate.uses_chat_template else ()
            called = (ProbeExchange.calling(_PROBE_TOOL["function"]["name"], count, candidate) for count in (1, 2))
            exchanges = [ANSWER_EXCHANGE, *called]
            system = None if candidate.uses_chat_template or isinstance(candidate, HermesUserResultFormat) else _TOLD
            try:
                chat = TemplateChatFormat(
                    tokenizer, exchanges, tools=tools, system=system, history=history, longest=EXPECTED_MAX_TURNS
                )
                return cls(chat, candidate)
            except ChatFormatError as error:
                refusal = error
        return cls(plain, HermesUserResultFormat(), refusal)

    def prompt(self, conversation: Sequence[Message], tools: ToolDefinitions) -> RenderedTokens:
        """A whole conversation as ids.

        Raises:
            ChatFormatError: the model's chat template refuses it.
        """
        if tools and self._no_tools is not None:
            raise ChatFormatError(f"This model cannot be offered tools in this way: {self._no_tools}")
        shown = self._shown(conversation, conversation, tools)
        if tools and not self._calls.uses_chat_template:
            by: Role = "user" if isinstance(self._calls, HermesUserResultFormat) else "system"
            shown = _told(shown, self._calls.instructions(_tools(tools)), by=by)
        return self.chat.render_prompt(shown, self._described(tools))

    def continuation(
        self, new: Sequence[Message], after: RenderedTokens, conversation: Sequence[Message], tools: ToolDefinitions
    ) -> RenderedTokens | None:
        """A conversation whose beginning stands on the record as ``after``, with ``new`` at its end.

        Returns:
            All of it, beginning with ``after`` as it is. None where the chat format would now write that differently,
            and is told not to put up with it.
        """
        rest = self.chat.render_continuation(
            self._shown(new, conversation, tools),
            after=after.ids,
            conversation=self._shown(conversation, conversation, tools),
            tools=self._described(tools),
        )
        if rest is None:
            return None
        moved = (PlacedImage.shifted(image, len(after.ids)) for image in rest.images)
        return RenderedTokens([*after.ids, *rest.ids], (*after.images, *moved))

    def read(self, generation: Generation, request: ModelRequest, *, first_call: int) -> ModelAnswer:
        """What a generation says.

        A malformed call is left in the text, with all others of its turn: nobody must run half of what was meant. So is
        one with arguments that JSON cannot hold, and that a program could not send back.

        Args:
            generation: what was sampled.
            request: what was asked for.
            first_call: number of the first call.
        """
        generation, stopped_at = self._stopped(generation, request.stops)
        reply = self.chat.parse_reply(generation.ids)
        text, content = reply.text, reply.content
        if stopped_at is not None:
            text, content = text.partition(stopped_at)[0], content.partition(stopped_at)[0]
        calls: tuple[ToolCall, ...] = ()
        if request.may_call and generation.finish_reason == "stop":
            found = (
                self._calls.parse(with_opening_marker(reply.opened, text), _tools(request.tools))
                if reply.calls is None
                else reply.calls
            )
            if all(map(_is_sound, found)):
                calls = found
        message: Message = {"role": "assistant", "content": content}
        if calls:
            told = (
                content
                if reply.calls is not None
                else text_of(_apart(self._calls).assistant_message(content, calls)["content"])
            )
            calls = tuple(
                dataclasses.replace(call, id=call_id(number))
                for number, call in enumerate(calls[: request.max_calls], first_call)
            )
            message = message_with_calls(told, calls)
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        return ModelAnswer(message, text, calls, generation)

    def _stopped(self, generation: Generation, stops: Sequence[str]) -> tuple[Generation, str | None]:
        """The generation up to the token that completes the first of ``stops``, and which that is."""
        said = self.chat.parse_reply(generation.ids).text
        found = [(said.index(stop), stop) for stop in stops if stop in said]
        if not found:
            return generation, None
        stop = min(found)[1]
        least, most = 1, len(generation.ids)
        while least < most:
            middle = (least + most) // 2
            if stop in self.chat.parse_reply(generation.ids[:middle]).text:
                most = middle
            else:
                least = middle + 1
        return _first(generation, most), stop

    def _described(self, tools: ToolDefinitions) -> ToolDefinitions:
        return tools if self._calls.uses_chat_template else ()

    def _shown(
        self, messages: Sequence[Message], conversation: Sequence[Message], tools: ToolDefinitions
    ) -> list[Message]:
        """Messages as the model is shown them."""
        if self._calls.uses_chat_template or not tools:
            return list(messages)
        names = {
            call["id"]: call["function"]["name"] for message in conversation for call in message.get("tool_calls") or ()
        }
        return [self._written(message, names) for message in messages]

    def _written(self, message: Message, names: Mapping[str, str]) -> Message:
        """A message whose calls or results are texts."""
        if message["role"] == "tool":
            call = message.get("tool_call_id", "")
            answer = self._calls.result_message(
                ToolCall(call, message.get("name") or names.get(call, "")), text_of(message["content"])
            )
            if images := images_of(message["content"]):
                answer["content"] = concat_content(answer["content"], image_parts(images))
            return answer
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            texts = [self._calls.write(call["name"], call["arguments"]) for call in calls]
            said = text_of(message["content"])
            missing = [text for text in texts if text not in said]
            return {"role": "assistant", "content": "\n".join(part for part in (said, *missing) if part)}
        return message


def _own_format(tokenizer: Tokenizer) -> ToolCallFormat:
    """The format that a model's chat template speaks of; Hermes where it speaks of none that is known."""
    template = tokenizer.chat_template
    return (detect_format(template) if template else None) or HermesFormat()


_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}

_TOLD: Message = {"role": "system", "content": "You can use tools."}


def _apart(calls: ToolCallFormat) -> ToolCallFormat:
    """The format as it tells what was said from the calls."""
    if dataclasses.is_dataclass(calls) and any(
        field.name == "uses_chat_template" for field in dataclasses.fields(calls)
    ):
        return dataclasses.replace(calls, uses_chat_template=True)
    return calls


def _tools(tools: ToolDefinitions) -> list[ProgramTool]:
    """The tools as tool-call formats ask about them."""
    return [ProgramTool.of(tool) for tool in tools]


def _is_sound(call: ToolCall) -> bool:
    """Whether a call was read, and can be handed to a program as JSON."""
    if call.arguments is None:
        return False
    try:
        count_chars([call.name, call.arguments])
    except UnsupportedValue:
        return False
    return True


def _told(conversation: list[Message], instructions: str, *, by: Role) -> list[Message]:
    """The conversation with instructions in its system message; ``by`` says who gives them where there is none."""
    first, *rest = conversation
    if first["role"] == "system":
        return [{**first, "content": f"{text_of(first['content'])}\n\n{instructions}".strip()}, *rest]
    if first["role"] != by:
        return [{"role": by, "content": instructions}, *conversation]
    return [{**first, "content": concat_content(f"{instructions}\n\n", first["content"])}, *rest]


def _first(generation: Generation, count: int) -> Generation:
    """The first tokens of a generation that was stopped there."""

    def cut(values: Any) -> Any:
        return values if values is None or isinstance(values, int) else values[:count]

    return Generation(
        generation.ids[:count],
        cut(generation.logprobs),
        "stop",
        cut(generation.version),
        cut(generation.raw_logprobs),
    )

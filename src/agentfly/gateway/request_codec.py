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
        """Return the type of an argument in words."""
        kind = self._about(name).get("type", "any")
        return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)

    def _about(self, name: str) -> Mapping[str, Any]:
        """Return the schema of an argument. A schema ``true`` accepts any value and counts as empty."""
        about = (self.json_schema.get("properties") or {}).get(name)
        return about if isinstance(about, Mapping) else {}


@dataclass(frozen=True, repr=False)
class ProgramTool:
    """A tool of a program.

    Attributes:
        name: the tool's name.
        description: what it does.
        definition: the definition for chat templates.
    """

    name: str
    description: str
    definition: Mapping[str, Any]

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Self:
        """Create a tool from a checked definition."""
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
    """An answer of the model, as the program receives it.

    Attributes:
        message: the answer as a message of the program's conversation.
        text: the whole sampled text, without the control token at its end.
        calls: the tool calls in it.
        generation: the sampled tokens, up to the stop string if there was one.
    """

    message: Message
    text: str
    calls: tuple[ToolCall, ...]
    generation: Generation


EXPECTED_MAX_TURNS = 200
"""Number of turns for which the stability of the chat format is checked."""


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
        """Create the codec of a model, checked for conversations with and without tools.

        Args:
            tokenizer: the model's tokenizer.
            calls: the tool-call format; by default the model's own, or else one that its chat template can render.
            history: what to do if the chat template renders past turns differently later; see `Gateway`.

        Raises:
            ChatFormatError: the chat template cannot render conversations even without tools.
        """
        plain = TemplateChatFormat(tokenizer, [ANSWER_EXCHANGE], history=history, longest=EXPECTED_MAX_TURNS)
        refusal: ChatFormatError | None = None
        for candidate in (calls,) if calls is not None else (_own_format(tokenizer), HermesUserResultFormat()):
            tools = [_PROBE_TOOL] if candidate.uses_chat_template else ()
            called = (ProbeExchange.calling(_PROBE_TOOL["function"]["name"], count, candidate) for count in (1, 2))
            exchanges = [ANSWER_EXCHANGE, *called]
            system = (
                None if candidate.uses_chat_template or isinstance(candidate, HermesUserResultFormat) else _PROBE_SYSTEM
            )
            try:
                chat = TemplateChatFormat(
                    tokenizer, exchanges, tools=tools, system=system, history=history, longest=EXPECTED_MAX_TURNS
                )
                return cls(chat, candidate)
            except ChatFormatError as error:
                refusal = error
        return cls(plain, HermesUserResultFormat(), refusal)

    def prompt(self, conversation: Sequence[Message], tools: ToolDefinitions) -> RenderedTokens:
        """Render a whole conversation as ids.

        Raises:
            ChatFormatError: the model's chat template rejects it.
        """
        if tools and self._no_tools is not None:
            raise ChatFormatError(f"This model cannot be given tools: {self._no_tools}")
        shown = self._shown(conversation, conversation, tools)
        if tools and not self._calls.uses_chat_template:
            by: Role = "user" if isinstance(self._calls, HermesUserResultFormat) else "system"
            shown = _with_instructions(shown, self._calls.instructions(_tools(tools)), by=by)
        return self.chat.render_prompt(shown, self._described(tools))

    def continuation(
        self, new: Sequence[Message], after: RenderedTokens, conversation: Sequence[Message], tools: ToolDefinitions
    ) -> RenderedTokens | None:
        """Render a conversation whose beginning is recorded as ``after`` and which ends with the messages ``new``.

        Returns:
            The whole conversation, beginning with ``after`` unchanged. None if the chat format would now render
            ``after`` differently, and ``history`` is ``"rewrite"``.
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
        """Parse a generation.

        If a call is malformed, all calls of the turn stay in the text, so that no program runs only some of them. The
        same holds for a call whose arguments JSON cannot represent, because a program could not send it back.

        Args:
            generation: the sampled tokens.
            request: the request that it answers.
            first_call: number of the first call, for its id.
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
            if all(map(_is_valid, found)):
                calls = found
        message: Message = {"role": "assistant", "content": content}
        if calls:
            visible = (
                content
                if reply.calls is not None
                else text_of(_for_template(self._calls).assistant_message(content, calls)["content"])
            )
            calls = tuple(
                dataclasses.replace(call, id=call_id(number))
                for number, call in enumerate(calls[: request.max_calls], first_call)
            )
            message = message_with_calls(visible, calls)
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        return ModelAnswer(message, text, calls, generation)

    def _stopped(self, generation: Generation, stops: Sequence[str]) -> tuple[Generation, str | None]:
        """Return the generation up to the token that completes the first stop string, and that string."""
        text = self.chat.parse_reply(generation.ids).text
        found = [(text.index(stop), stop) for stop in stops if stop in text]
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
        """Return messages as they are shown to the model."""
        if self._calls.uses_chat_template or not tools:
            return list(messages)
        names = {
            call["id"]: call["function"]["name"] for message in conversation for call in message.get("tool_calls") or ()
        }
        return [self._written(message, names) for message in messages]

    def _written(self, message: Message, names: Mapping[str, str]) -> Message:
        """Return a message with its calls or results as text."""
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
            content = text_of(message["content"])
            missing = [text for text in texts if text not in content]
            return {"role": "assistant", "content": "\n".join(part for part in (content, *missing) if part)}
        return message


def _own_format(tokenizer: Tokenizer) -> ToolCallFormat:
    """Return the tool-call format that a model's chat template describes, or Hermes if it describes no known one."""
    template = tokenizer.chat_template
    return (detect_format(template) if template else None) or HermesFormat()


_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}

_PROBE_SYSTEM: Message = {"role": "system", "content": "You can use tools."}


def _for_template(calls: ToolCallFormat) -> ToolCallFormat:
    """Return the format as used with chat templates, which separates the calls from the text."""
    if dataclasses.is_dataclass(calls) and any(
        field.name == "uses_chat_template" for field in dataclasses.fields(calls)
    ):
        return dataclasses.replace(calls, uses_chat_template=True)
    return calls


def _tools(tools: ToolDefinitions) -> list[ProgramTool]:
    """Return the tools in the form that tool-call formats use."""
    return [ProgramTool.of(tool) for tool in tools]


def _is_valid(call: ToolCall) -> bool:
    """Return whether a call was parsed and can be sent to a program as JSON."""
    if call.arguments is None:
        return False
    try:
        count_chars([call.name, call.arguments])
    except UnsupportedValue:
        return False
    return True


def _with_instructions(conversation: list[Message], instructions: str, *, by: Role) -> list[Message]:
    """Add instructions to the system message of a conversation, or to a first message of the role ``by``."""
    first, *rest = conversation
    if first["role"] == "system":
        return [{**first, "content": f"{text_of(first['content'])}\n\n{instructions}".strip()}, *rest]
    if first["role"] != by:
        return [{"role": by, "content": instructions}, *conversation]
    return [{**first, "content": concat_content(f"{instructions}\n\n", first["content"])}, *rest]


def _first(generation: Generation, count: int) -> Generation:
    """Return the first ``count`` tokens of a generation, as one that has stopped there."""

    def cut(values: Any) -> Any:
        return values if values is None or isinstance(values, int) else values[:count]

    return Generation(
        generation.ids[:count],
        cut(generation.logprobs),
        "stop",
        cut(generation.version),
        cut(generation.raw_logprobs),
    )

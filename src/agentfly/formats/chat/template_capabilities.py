"""TemplateCapabilities: which forms of messages a chat template accepts, and how conversations are adapted to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import (
    Content,
    Image,
    Message,
    concat_content,
    move_tool_images_to_user_messages,
    parts_of,
    text_of,
)
from agentfly.formats.reasoning import REASONING_MARKERS, ReasoningMarkers
from agentfly.policies.policy import Tokenizer


def split_parallel_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call per turn, each followed by its answer."""
    single: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        for at, turn in enumerate(waiting):
            if message["role"] != "tool" or _answers_one_of([turn["tool_calls"][0]["id"]], message):
                due = at if message["role"] == "tool" else len(waiting)
                single += waiting[: due + 1]
                del waiting[: due + 1]
                break
        calls = message.get("tool_calls", ())
        single.append(cast(Message, {**message, "tool_calls": [*calls[:1]]}) if len(calls) > 1 else message)
        waiting += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
    return single + waiting


def orphan_results_to_user_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages. A tool result without a call in the turn before it becomes a user message."""
    calls: list[str] = []
    for message in messages:
        if message["role"] != "tool":
            calls = [call["id"] for call in message.get("tool_calls", ())]
        if message["role"] != "tool" or _answers_one_of(calls, message):
            yield message
        else:
            yield {"role": "user", "content": message["content"]}


def _answers_one_of(calls: Collection[str], answer: Message) -> bool:
    """Return whether a tool message answers one of these calls. A message without a call id answers any."""
    return answer["tool_call_id"] in calls if "tool_call_id" in answer else bool(calls)


PROBE_QUESTION: Message = {"role": "user", "content": "question"}

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "stand_in_tool",
        "description": "Stands for the tools.",
        "parameters": {
            "type": "object",
            "properties": {"argument": {"type": "string", "description": "An argument."}},
            "required": ["argument"],
        },
    },
}
"""A tool for synthetic conversations."""

UNKNOWN = "unknown"
"""What a tool is called where the model has called it by no name."""

_REASONING, _ANSWER, _KEY = "the reasoning", "the answer", "an_argument"


@dataclass(frozen=True)
class TemplateCapabilities:
    """The forms of messages that one template accepts, detected by rendering small conversations.

    Attributes:
        requires_string_arguments: a call's arguments must be JSON text rather than a mapping.
        requires_short_call_ids: call ids must be nine letters and digits.
        single_tool_call: a turn may have only one call; further calls become turns that follow.
        tool_message_requires_call: a ``tool`` message must answer a call; other results become user messages.
        requires_tool_name: ``tool`` messages must name the tool.
        allows_user_after_tool: a user message may follow a ``tool`` message; otherwise its text is appended to it.
        requires_alternating_roles: two user messages must not follow each other.
        requires_typed_content: content must be a list of parts, also for plain text.
        no_images_in_tool_messages: images of tool results must be in a user message that follows.
        reads_reasoning_content: reasoning must be in its own field rather than in the text.
        reasoning_or_content: a turn with calls may have reasoning or text, but not both. The text is then appended to
            the reasoning.
        reasoning: the markers of reasoning in a turn's text.
    """

    requires_string_arguments: bool = False
    requires_short_call_ids: bool = False
    single_tool_call: bool = False
    tool_message_requires_call: bool = False
    requires_tool_name: bool = False
    allows_user_after_tool: bool = True
    requires_alternating_roles: bool = False
    requires_typed_content: bool = False
    no_images_in_tool_messages: bool = False
    reads_reasoning_content: bool = False
    reasoning_or_content: bool = False
    reasoning: ReasoningMarkers = field(default_factory=ReasoningMarkers)

    def allows(self, turn: Message) -> bool:
        """Return whether the template can render a turn with as many calls as this one has."""
        return not self.single_tool_call or len(turn.get("tool_calls", ())) <= 1

    def split(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the reasoning of assistants in its own field."""
        return [self._split(message) if message["role"] == "assistant" else message for message in messages]

    def adapt_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in a form that the template accepts. The argument is not changed."""
        fitted: list[Message] = []
        messages = split_parallel_calls(messages) if self.single_tool_call else messages
        messages = list(orphan_results_to_user_messages(messages)) if self.tool_message_requires_call else messages
        for message in move_tool_images_to_user_messages(messages) if self.no_images_in_tool_messages else messages:
            if message["role"] == "user" and fitted and self._belongs_below(fitted[-1]):
                fitted[-1] = {
                    **fitted[-1],
                    "content": concat_content(fitted[-1]["content"], "\n\n", message["content"]),
                }
            elif message["role"] == "assistant":
                fitted.append(self._fit_assistant(self._split(message)))
            elif message["role"] == "tool":
                fitted.append(self._fit_result(message))
            else:
                fitted.append(message)
        return [self._fit_content(message) for message in fitted]

    def _fit_content(self, message: Message) -> Message:
        content = message["content"]
        wanted = parts_of(content) if self.requires_typed_content else _plain(content)
        return message if wanted is content else cast(Message, {**message, "content": wanted})

    def _belongs_below(self, message: Message) -> bool:
        """Return whether a user message cannot follow ``message`` and must be appended to it."""
        if message["role"] == "tool":
            return not self.allows_user_after_tool
        return message["role"] == "user" and self.requires_alternating_roles

    def _split(self, message: Message) -> Message:
        if "reasoning_content" in message or not isinstance(message["content"], str):
            return message
        reasoning, content = self.reasoning.split(message["content"], opened=False)
        return message if reasoning is None else {**message, "content": content, "reasoning_content": reasoning}

    def _fit_assistant(self, message: Message) -> Message:
        fitted = dict(message)
        if not self.reads_reasoning_content and (reasoning := fitted.pop("reasoning_content", None)) is not None:
            fitted["content"] = self.reasoning.join(cast(str, reasoning), text_of(message["content"]))
        if self.reasoning_or_content and fitted.get("tool_calls") and fitted.get("reasoning_content"):
            content = text_of(message["content"])
            fitted["reasoning_content"] = "\n\n".join(filter(None, (cast(str, fitted["reasoning_content"]), content)))
            fitted["content"] = ""
        if message.get("tool_calls"):
            fitted["tool_calls"] = [self._fit_call(call) for call in message["tool_calls"]]
        return cast(Message, fitted)

    def _fit_result(self, message: Message) -> Message:
        fitted = dict(message)
        if self.requires_short_call_ids and "tool_call_id" in message:
            fitted["tool_call_id"] = self._id(message["tool_call_id"])
        if self.requires_tool_name and "name" not in message:
            fitted["name"] = UNKNOWN
        return cast(Message, fitted)

    def _fit_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if self.requires_string_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "type": "function",
            **call,
            "id": self._id(call["id"]),
            "function": {**function, "arguments": arguments},
        }

    def _id(self, call_id: str) -> str:
        if not self.requires_short_call_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def detect_capabilities(tokenizer: Tokenizer) -> TemplateCapabilities:
    """Detect the forms of messages that a tokenizer's template accepts.

    Raises:
        ChatFormatError: the template cannot render even a single question.
    """
    tokenizer.apply_chat_template([PROBE_QUESTION], add_generation_prompt=True)
    as_text, short_ids, one_call = _calls(tokenizer)
    results_follow_calls, requires_tool_name, user_after_results = _results(tokenizer)
    once, twice = _rendered(tokenizer, [PROBE_QUESTION]), _rendered(tokenizer, [PROBE_QUESTION, PROBE_QUESTION])
    parts, images_apart = _images(tokenizer) if tokenizer.vision is not None else (False, False)
    reads_reasoning, markers = _reasoning(tokenizer)
    one_user_message = once is not None and twice is None
    return TemplateCapabilities(
        as_text,
        short_ids,
        one_call,
        results_follow_calls,
        requires_tool_name,
        user_after_results,
        one_user_message,
        parts,
        images_apart,
        reads_reasoning,
        reads_reasoning and _reasoning_or_content(tokenizer),
        markers,
    )


def _calls(tokenizer: Tokenizer) -> tuple[bool, bool, bool]:
    """Return whether arguments must be text, whether ids must be short, and whether a turn may have only one call."""
    for short, ids in ((False, ("call_0", "call_1")), (True, ("abcdefgh0", "abcdefgh1"))):
        for as_text, arguments in ((False, {_KEY: "value"}), (True, json.dumps({_KEY: "value"}))):
            written = _rendered(tokenizer, [PROBE_QUESTION, _calling(ids[:1], arguments)])
            if written is not None and _KEY in written and f"'{_KEY}'" not in written:
                both = _rendered(tokenizer, [PROBE_QUESTION, _calling(ids, arguments)])
                return as_text, short, both is None or both.count(_KEY) < 2 * written.count(_KEY)
    return False, False, False


def _results(tokenizer: Tokenizer) -> tuple[bool, bool, bool]:
    """Return whether results must follow a call, must name their tool, and may be followed by a user message."""
    reply: Message = {"role": "assistant", "content": _ANSWER}
    result: Message = {"role": "tool", "name": "stand_in_tool", "tool_call_id": "abcdefgh0", "content": _KEY}
    uncalled = _rendered(tokenizer, [PROBE_QUESTION, reply, result, reply, result])
    in_either_way: tuple[Any, Any] = ({}, "{}")
    calling = [[_calling(["abcdefgh0"], arguments), result] for arguments in in_either_way]
    answered = any(_rendered(tokenizer, [PROBE_QUESTION, *called]) for called in calling)
    noted = any(_rendered(tokenizer, [PROBE_QUESTION, *called, PROBE_QUESTION]) for called in calling)
    nameless = cast(Message, {name: value for name, value in result.items() if name != "name"})
    ways = [[reply, result], *calling]
    named = any(
        _rendered(tokenizer, [PROBE_QUESTION, *way]) is not None
        and _rendered(tokenizer, [PROBE_QUESTION, *way[:-1], nameless]) is None
        for way in ways
    )
    return uncalled is None or uncalled.count(_KEY) < 2, named, noted or not answered


def _images(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Return whether content must be a list of parts, and whether tool results cannot contain images."""
    whole = _rendered(tokenizer, [PROBE_QUESTION])
    in_parts = _rendered(tokenizer, [{"role": "user", "content": parts_of(_ANSWER)}])
    parts = (
        (whole is None or text_of(PROBE_QUESTION["content"]) not in whole)
        and in_parts is not None
        and _ANSWER in in_parts
    )
    assert tokenizer.vision is not None
    placeholder = tokenizer.vision.placeholder
    image: Any = {"type": "image", "image": Image(b"")}
    answer: Message = {"role": "tool", "name": "stand_in_tool", "tool_call_id": "abcdefgh0", "content": [image]}
    written = [
        _rendered(tokenizer, [PROBE_QUESTION, _calling(["abcdefgh0"], {}), {**answer, "role": role}])
        for role in ("tool", "user")
    ]
    by_tool, by_user = (text is not None and placeholder in text for text in written)
    return parts, by_user and not by_tool


def _reasoning(tokenizer: Tokenizer) -> tuple[bool, ReasoningMarkers]:
    """Return whether the template reads reasoning from its own field, and the markers of reasoning in a turn."""
    header = tokenizer.apply_chat_template([PROBE_QUESTION], add_generation_prompt=True).rstrip()
    answer: Message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASONING}
    rendered = _rendered(tokenizer, [PROBE_QUESTION, answer])
    reads = rendered is not None and _REASONING in rendered
    around = rendered.replace(_ANSWER, "") if rendered is not None and reads else header
    opener = next((opener for opener in REASONING_MARKERS if opener in around), None)
    opener = opener or next((opener for opener in REASONING_MARKERS if opener in tokenizer.control_tokens), "<think>")
    return reads, ReasoningMarkers(opener, REASONING_MARKERS[opener], header.endswith(opener))


def _reasoning_or_content(tokenizer: Tokenizer) -> bool:
    """Return whether a turn with calls may have reasoning or text, but not both."""
    reasoning, content = {"reasoning_content": _REASONING}, {"content": _ANSWER}
    in_either_way: tuple[Any, Any] = ({}, "{}")
    for arguments in in_either_way:
        calling = _calling(["abcdefgh0"], arguments)
        alone, both = (
            [_rendered(tokenizer, [PROBE_QUESTION, cast(Message, {**calling, **each})]) for each in kinds]
            for kinds in ((reasoning, content), ({**reasoning, **content},))
        )
        if None not in alone and both == [None]:
            return True
    return False


def _calling(ids: Sequence[str], arguments: Any) -> Message:
    function = {"name": "stand_in_tool", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message]) -> str | None:
    try:
        return tokenizer.apply_chat_template(messages, tools=[PROBE_TOOL])
    except ChatFormatError:
        return None


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _plain(content: Content) -> Content:
    """Return content that is text only as a string, because not every template accepts parts."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return text_of(content)

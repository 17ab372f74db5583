"""TemplateRenderer: renders whole conversations and continuations with a chat template, and finds its end of turn."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Message
from agentfly.formats.chat.chat_format import ToolDefinitions
from agentfly.formats.chat.control_tokens import SLOT_MARK, ControlTokens
from agentfly.formats.chat.template_capabilities import (
    PROBE_QUESTION,
    PROBE_TOOL,
    UNKNOWN,
    TemplateCapabilities,
    detect_capabilities,
)
from agentfly.policies.policy import Tokenizer

SlotKind = Literal["reasoning", "content", "arguments"]
SLOT_KINDS: tuple[SlotKind, ...] = ("reasoning", "content", "arguments")
_SLOT = re.compile(f"{SLOT_MARK}({'|'.join(SLOT_KINDS)}) ([0-9]+){SLOT_MARK}")


def slot(kind: SlotKind, number: int) -> str:
    """Return the placeholder for the text of the assistant's turn with this number. No escaped text contains it."""
    return f"{SLOT_MARK}{kind} {number}{SLOT_MARK}"


def slotted_reply(number: int, *, calls: Sequence[dict[str, Any]] = (), thinks: bool = False) -> Message:
    """Return an assistant's turn with placeholders for its text. Names and ids of its calls are kept."""
    message: dict[str, Any] = {"role": "assistant", "content": slot("content", number)}
    if thinks:
        message["reasoning_content"] = slot("reasoning", number)
    if calls:
        arguments = {"argument": slot("arguments", number)}
        message["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": arguments}} for call in calls
        ]
    return cast(Message, message)


def slots_of(message: Message, number: int) -> list[str]:
    """Return the placeholders that `with_slots` puts into an assistant's turn."""
    filled: dict[SlotKind, object] = {
        "reasoning": message.get("reasoning_content"),
        "content": message["content"],
        "arguments": message.get("tool_calls"),
    }
    return [slot(kind, number) for kind, value in filled.items() if value]


def with_slots(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with placeholders in assistants' turns, numbered by position. Empty content stays."""
    bare: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            bare.append(message)
            continue
        thinks = bool(message.get("reasoning_content"))
        turn = slotted_reply(number, calls=message.get("tool_calls", ()), thinks=thinks)
        bare.append(turn if message["content"] else cast(Message, {**turn, "content": ""}))
    return bare


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Position of a turn's text in a rendered conversation, and which parts of it were written."""

    start: int
    stop: int
    kinds: frozenset[SlotKind]


def spans_of(rendered: str) -> dict[int, SlotSpan]:
    """Return the spans of all turns in a rendered conversation by their numbers, in one pass."""
    spans: dict[int, SlotSpan] = {}
    for found in _SLOT.finditer(rendered):
        kind, number = cast(SlotKind, found[1]), int(found[2])
        begun = spans.get(number)
        start, earlier = (begun.start, begun.kinds) if begun else (found.start(), frozenset[SlotKind]())
        spans[number] = SlotSpan(start, found.end(), earlier | {kind})
    return spans


def first_slot(rendered: str, number: int) -> int:
    """Return the position of a turn's first placeholder.

    Raises:
        ChatFormatError: the template wrote no part of the turn.
    """
    found = [at for kind in SLOT_KINDS if (at := rendered.find(slot(kind, number))) >= 0]
    if not found:
        raise ChatFormatError(
            "The model's chat template leaves out an assistant's reply once other messages follow it, so a "
            "conversation cannot be continued turn by turn. Use a model with a template that keeps replies."
        )
    return min(found)


def end_of_last_slot(rendered: str, number: int) -> int:
    """Return the end of a turn's last placeholder.

    Raises:
        ChatFormatError: the template wrote no part of the turn.
    """
    mark = f" {number}{SLOT_MARK}"
    found = rendered.rfind(mark)
    return found + len(mark) if found >= 0 else first_slot(rendered, number)


PROBE_CALL = {"id": "call_0", "type": "function", "function": {"name": "stand_in_tool", "arguments": {}}}
PROBE_RESULT: Message = {"role": "tool", "name": "stand_in_tool", "tool_call_id": "call_0", "content": "result"}


@dataclass(frozen=True)
class EndOfTurn:
    """How turns end in a chat template.

    Attributes:
        stop_ids: ids that a model samples at the end of a turn: those that its template writes there, and the stop ids
            of its tokenizer and generation settings.
        end_ids: ids that also end a turn in the middle of a conversation.
        ends_by_next_header: whether a turn ends at the next turn's header, whose first token the model samples.
    """

    stop_ids: tuple[int, ...]
    end_ids: frozenset[int]
    ends_by_next_header: bool


def detect_end_of_turn(tokenizer: Tokenizer, control: ControlTokens, shape: TemplateCapabilities) -> EndOfTurn:
    """Detect how turns end in a tokenizer's chat template.

    Raises:
        ChatFormatError: it writes no control token after a turn, so that a turn has no end to sample.
    """

    def after_turn(turn: Message, *following: Message) -> str | None:
        messages = shape.adapt_messages([PROBE_QUESTION, turn, *following])
        tools = [PROBE_TOOL] if "tool_calls" in turn else []
        try:
            rendered = tokenizer.apply_chat_template(messages, tools=tools)
            return rendered[end_of_last_slot(rendered, 0) :]
        except ChatFormatError:
            return None

    reply, calling = slotted_reply(0), slotted_reply(0, calls=[PROBE_CALL])
    last, inner = after_turn(reply), after_turn(reply, PROBE_QUESTION)
    if last is None:
        tokenizer.apply_chat_template(shape.adapt_messages([PROBE_QUESTION, reply]))  # raises if it is rejected
        raise ChatFormatError("The model's chat template leaves an assistant's answer out of the conversation.")
    at_end = control.first_in(last)
    calling_last, calling_inner = after_turn(calling), after_turn(calling, PROBE_RESULT)
    if at_end is None:
        headers = [_behind(last, inner), _behind(calling_last, calling_inner)]
        return _by_next_header(control, [header for header in headers if header is not None], tokenizer.eos_ids)
    stops = [at_end[1]]
    if calling_last:
        found = [tokenizer.control_tokens[token] for token in control.in_text(calling_last)]
        stops += found[-1:] if at_end[1] not in found else []
    in_the_middle = control.first_in(inner) if inner else None
    ends = frozenset(stops) | ({in_the_middle[1]} if in_the_middle else set())
    return EndOfTurn(_with(tokenizer.eos_ids, stops), ends, False)


def strip_end_of_turn(ids: Sequence[int], stop_ids: Collection[int], control: Collection[int]) -> Sequence[int]:
    """Return a generation without its end of turn.

    A model may have a stop token of ordinary text. Such a token is part of the turn's text; for the template it does
    not end the turn.

    Args:
        ids: the generation.
        stop_ids: the ids at which it may have stopped.
        control: the ids of control tokens.
    """
    return ids[:-1] if ids and ids[-1] in stop_ids and ids[-1] in control else ids


def _behind(beginning: str | None, whole: str | None) -> str | None:
    """Return the rest of a text after a prefix, without white space at the border."""
    if beginning is None or whole is None or not whole.startswith(beginning.rstrip()):
        return None
    return whole[len(beginning.rstrip()) :]


def _by_next_header(control: ControlTokens, headers: Sequence[str], eos_ids: Sequence[int]) -> EndOfTurn:
    ends = [found[1] for header in headers if (found := control.first_in(header))]
    if not ends:
        raise ChatFormatError(
            "The model's chat template writes no control token at the end of an assistant's turn, so a turn has no "
            "end to sample. Use a model whose template ends turns, for instance with <|im_end|>."
        )
    return EndOfTurn(_with(eos_ids, ends), frozenset(ends), True)


def _with(eos_ids: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*stops, *eos_ids]))


_PROBE_TOOLS = (PROBE_TOOL,)

_CACHE_SIZE = 4
"""Number of sets of tools with cached descriptions: those of a few agents or programs, and the probe's."""


@dataclass(frozen=True, slots=True)
class _EscapedTools:
    """Definitions of tools as the template gets them, and the tools that they were made of."""

    tools: ToolDefinitions | None
    key: str
    escaped: list[Any]


class TemplateRenderer:
    """Renders conversations with a tokenizer's chat template, in the form that the template accepts.

    Raises:
        ChatFormatError: the tokenizer has no template, or its template ends turns with no control token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A cache, newest first. It is replaced as a whole, because threads may share it.
        self._escaped_tools: tuple[_EscapedTools, ...] = ()
        self.control = ControlTokens(tokenizer)
        self.shape = detect_capabilities(tokenizer)
        self.endings = detect_end_of_turn(tokenizer, self.control, self.shape)
        self.control.allow_in_replies(self._inner_tokens())

    def render(self, messages: Sequence[Message], tools: ToolDefinitions = (), *, opens: bool = True) -> str:
        """Render a conversation; ``opens`` says whether the assistant's next turn begins."""
        return self._render(self.control.escape(messages), tools, opens=opens)

    def render_with_slots(self, messages: Sequence[Message], tools: ToolDefinitions = (), *, opens: bool = True) -> str:
        """Render a conversation with placeholders in assistants' turns, numbered by the positions of the messages."""
        canonical = self.shape.split(self.control.escape(messages))
        return self._render(with_slots(canonical), tools, opens=opens)

    def slots(self, messages: Sequence[Message], number: int) -> list[str]:
        """Return all placeholders that `render_with_slots` may write for the message at a position."""
        return slots_of(self.shape.split([messages[number]])[0], number)

    def render_continuation(self, messages: Sequence[Message], tools: ToolDefinitions = ()) -> str:
        """Return the template's text from the end of a turn on, if ``messages`` answer it.

        It is rendered after a reply in a short synthetic conversation.
        """
        answers = self.control.escape(messages)
        calls = [_call_of(answer) for answer in answers if answer["role"] == "tool"] if tools else []
        turn = slotted_reply(0, calls=calls[:1] if self.shape.single_tool_call else calls)
        rendered = self._render([PROBE_QUESTION, turn, *answers], _PROBE_TOOLS if tools else (), opens=True)
        return rendered[self.end_of_turn(rendered, 0) :]

    def end_of_turn(self, rendered: str, number: int) -> int:
        """Return the position of a turn's end-of-turn token.

        Raises:
            ChatFormatError: the template wrote no part of the turn, or no end.
        """
        return self.end_of_turn_after(rendered, end_of_last_slot(rendered, number))

    def end_of_turn_after(self, rendered: str, begin: int) -> int:
        """Return the position of the end-of-turn token of a turn whose text ends at ``begin``.

        Raises:
            ChatFormatError: the template wrote no end.
        """
        found = self.control.first_in(rendered, self.endings.end_ids, start=begin)
        if found is None:
            raise ChatFormatError(
                "The model's chat template does not end every turn of an assistant with the same control token, so the "
                f"end of a turn is not known: {rendered[begin : begin + 80]!r}. Use another template."
            )
        return found[0]

    def _render(self, escaped: Sequence[Message], tools: ToolDefinitions, *, opens: bool) -> str:
        return self._tokenizer.apply_chat_template(
            self.shape.adapt_messages(escaped),
            tools=self._escape_tools(tools) if tools else [],
            add_generation_prompt=opens,
        )

    def _escape_tools(self, tools: ToolDefinitions) -> list[Any]:
        for known in self._escaped_tools:
            if known.tools is tools:
                return known.escaped
        key = repr(tools)  # unlike equality, it distinguishes the order of keys, and True from 1
        found = next((known for known in self._escaped_tools if known.key == key), None)
        if found is None:
            # The owner of a list may change it, so only tuples are found by identity.
            kept = tools if isinstance(tools, tuple) else None
            found = _EscapedTools(kept, key, self.control.escape_tools(tools))
            self._escaped_tools = (found, *self._escaped_tools[: _CACHE_SIZE - 1])
        return found.escaped

    def _inner_tokens(self) -> set[str]:
        """Return the control tokens that a turn may contain: those around reasoning and calls."""
        inner = {self.shape.reasoning.opener, self.shape.reasoning.closer}
        opening = self._render([PROBE_QUESTION], (), opens=True)
        for turn in (
            slotted_reply(0, thinks=True),
            slotted_reply(0, calls=[PROBE_CALL], thinks=True),
            slotted_reply(0, calls=[PROBE_CALL]),
        ):
            try:
                rendered = self._render([PROBE_QUESTION, turn, PROBE_QUESTION], (), opens=False)
                stop = self.end_of_turn(rendered, 0)
            except ChatFormatError:
                continue
            own = rendered[len(opening) : stop] if rendered.startswith(opening) else ""
            if self._writes(own):
                inner.update(self.control.in_text(own))
        ends = self.endings.end_ids | set(self.endings.stop_ids)
        return {token for token in inner if self._tokenizer.control_tokens.get(token) not in ends}

    def _writes(self, text: str) -> bool:
        """Return whether the template accepts a text of the assistant. Some reject their own markers in it."""
        try:
            self._render([PROBE_QUESTION, {"role": "assistant", "content": text}, PROBE_QUESTION], (), opens=False)
        except ChatFormatError:
            return False
        return True


def _call_of(answer: Message) -> dict[str, Any]:
    name = answer.get("name", UNKNOWN)
    call_id = answer.get("tool_call_id", PROBE_CALL["id"])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}

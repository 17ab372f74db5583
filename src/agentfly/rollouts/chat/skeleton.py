"""Skeleton: a conversation with places for its assistants' words, so that what stands around them shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.rollouts.chat.disarming import PLACE

Words = Literal["thought", "said", "called"]
WORDS: tuple[Words, ...] = ("thought", "said", "called")
_PLACES = re.compile(f"{PLACE}({'|'.join(WORDS)}) ([0-9]+){PLACE}")


def place(words: Words, number: int) -> str:
    """What stands for words of the assistant's turn with this number. No disarmed text holds it."""
    return f"{PLACE}{words} {number}{PLACE}"


def reply(number: int, *, calls: Sequence[dict[str, Any]] = (), thinks: bool = False) -> Message:
    """An assistant's turn whose words are places; of its calls, names and ids are kept."""
    message: dict[str, Any] = {"role": "assistant", "content": place("said", number)}
    if thinks:
        message["reasoning_content"] = place("thought", number)
    if calls:
        arguments = {"argument": place("called", number)}
        message["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": arguments}} for call in calls
        ]
    return cast(Message, message)


def places_of(message: Message, number: int) -> list[str]:
    """The places that `skeleton` puts into an assistant's turn."""
    words = [
        *(["thought"] if message.get("reasoning_content") else []),
        *(["said"] if message["content"] else []),
        *(["called"] if message.get("tool_calls") else []),
    ]
    return [place(cast(Words, word), number) for word in words]


def skeleton(messages: Sequence[Message]) -> list[Message]:
    """The conversation with places for what its assistants say, numbered by position; silence stays silence."""
    bare: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            bare.append(message)
            continue
        thinks = bool(message.get("reasoning_content"))
        turn = reply(number, calls=message.get("tool_calls", ()), thinks=thinks)
        bare.append(turn if message["content"] else cast(Message, {**turn, "content": ""}))
    return bare


@dataclass(frozen=True, slots=True)
class Span:
    """Where the words of a turn stand in a rendered conversation, and which of them do."""

    start: int
    stop: int
    words: frozenset[Words]


def spans_of(rendered: str) -> dict[int, Span]:
    """The spans of all turns in a rendered conversation, by their numbers. One pass, however long it is."""
    spans: dict[int, Span] = {}
    for found in _PLACES.finditer(rendered):
        words, number = cast(Words, found[1]), int(found[2])
        begun = spans.get(number)
        start, others = (begun.start, begun.words) if begun else (found.start(), frozenset[Words]())
        spans[number] = Span(start, found.end(), others | {words})
    return spans


def first_place(rendered: str, number: int) -> int:
    """Where the first words of a turn stand.

    Raises:
        ChatFormatError: none of them were written.
    """
    found = [at for words in WORDS if (at := rendered.find(place(words, number))) >= 0]
    if not found:
        raise ChatFormatError(
            "The model's chat template leaves out an assistant's reply once other messages follow it, so a "
            "conversation cannot be continued turn by turn. Use a model with a template that keeps replies."
        )
    return min(found)


def behind_last_place(rendered: str, number: int) -> int:
    """Where the words of a turn end.

    Raises:
        ChatFormatError: none of them were written.
    """
    mark = f" {number}{PLACE}"
    found = rendered.rfind(mark)
    return found + len(mark) if found >= 0 else first_place(rendered, number)

"""ModelRequest: what a program asks of the model, in one form whichever API it speaks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentfly.messages import Message, images_of, text_of
from agentfly.rollouts.chat.chat_format import Definitions

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True)
class ModelRequest:
    """What a program asks of the model.

    Attributes:
        conversation: what the model is to answer.
        tools: the tools it may call.
        sampling: the parameters of sampling that the program has named, by their names in OpenAI's API.
        max_tokens: the most tokens of the answer.
        stops: texts that end the answer; what is sampled behind the first of them counts as not sampled.
        may_call: whether calls in the answer are read as such.
        max_calls: how many calls the program takes at a time; None for any number.
    """

    conversation: Sequence[Message]
    tools: Definitions = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = sys.maxsize
    stops: Sequence[str] = ()
    may_call: bool = True
    max_calls: int | None = None

    @cached_property
    def hashes(self) -> tuple[int, ...]:
        """For each number of its first messages, from 0 on, a hash of these and the tools.

        What client libraries change in messages does not count: see `same_message`. In an answer with calls, the calls
        count alone, because some libraries drop what was said beside them.
        """
        begun = hash(_CANONICAL.encode(_plain(list(self.tools))))
        return (begun, *extended(begun, self.conversation))

    @cached_property
    def size(self) -> int:
        """How many bytes its conversation takes, about."""
        return size_of(self.conversation)


def extended(begun: int, messages: Sequence[Message]) -> Iterator[int]:
    """The hashes of a conversation, given by its hash, with each of some further messages at its end."""
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            said = _CANONICAL.encode(_plain(calls_of(message))) if calls else text_of(content).strip()
            begun = hash((begun, "assistant", said))
        elif isinstance(content, str):
            begun = hash((begun, message["role"], content))
        else:
            parts = (part["text"] if part["type"] == "text" else part["image"] for part in content)
            begun = hash((begun, message["role"], *parts))
        yield begun


def size_of(messages: Sequence[Message]) -> int:
    """How many bytes messages take, about."""
    size = 0
    for message in messages:
        content = message["content"]
        size += 200
        if isinstance(content, str):
            size += len(content)
        else:
            size += len(text_of(content)) + sum(len(image.data) for image in images_of(content))
        if "reasoning_content" in message:
            size += len(message["reasoning_content"])
        for call in message.get("tool_calls") or ():
            size += 200 + 2 * len(str(call["function"]["arguments"]))
    return size


def same_message(known: Message, shown: Message) -> bool:
    """Whether a message that a program shows is a known one. Names and ids do not count: libraries change them."""
    if known["role"] != shown["role"]:
        return False
    if known["role"] != "assistant":
        return known["content"] == shown["content"]
    calls = "tool_calls" in known or "tool_calls" in shown
    if calls and calls_of(known) != calls_of(shown):
        return False
    said, repeated = text_of(known["content"]).strip(), text_of(shown["content"]).strip()
    return said == repeated or (calls and not repeated)  # some libraries drop what was said beside a call


def calls_of(message: Message) -> list[tuple[Any, Any]]:
    """The names and the arguments of a message's calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def _plain(value: Any) -> Any:
    """A value in which numbers count by what they are: ``1.0`` as ``1``, which other languages make of it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

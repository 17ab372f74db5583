"""Chat messages and tool calls as plain values, shared by every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

from agentfly.images import Image

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(TypedDict):
    """A stretch of text in a message that holds images too."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a message."""

    type: Literal["image"]
    image: Image


Part = TextPart | ImagePart
Content = str | Sequence[Part]


class Message(TypedDict):
    """One message of a chat, in the shape that chat templates read.

    ``tool_calls`` have the shape of OpenAI's API, except that ``function.arguments`` is a mapping and no text.
    """

    role: Role
    content: Content
    name: NotRequired[str]
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    reasoning_content: NotRequired[str]


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


def text_of(content: Content) -> str:
    """The text of a message's content, its images left out."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def images_of(content: Content) -> list[Image]:
    """The images of a message's content, in order."""
    if isinstance(content, str):
        return []
    return [part["image"] for part in content if part["type"] == "image"]


def message_to_json(message: Message) -> dict[str, Any]:
    """A message as JSON can hold it: its images as data URLs."""
    content = message["content"]
    if isinstance(content, str):
        return {**message}
    parts = [{**part, "image": part["image"].url} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}


def message_from_json(value: Mapping[str, Any]) -> Message:
    """The inverse of `message_to_json`."""
    if isinstance(value["content"], str):
        return cast(Message, dict(value))
    parts = [
        {**part, "image": Image.from_url(part["image"])} if part["type"] == "image" else part
        for part in value["content"]
    ]
    return cast(Message, {**value, "content": parts})

"""Chat messages and tool calls as plain values, shared by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from agentfly.errors import UsageError, type_of
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


def parts_of(content: Content) -> Sequence[Part]:
    """A message's content in parts, a text as the only one."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def image_parts(images: Iterable[Image]) -> list[Part]:
    """Images as content."""
    return [{"type": "image", "image": image} for image in images]


def joined(*contents: Content) -> Content:
    """Contents one after another: a text if all of them are, and otherwise a list of parts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    return [part for content in contents for part in parts_of(content)]


def with_images_apart(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages in which tools answer in text only: the images of their results follow in a message of the user."""
    shown: list[Part] = []
    for message in messages:
        if message["role"] != "tool":
            if shown:
                yield {"role": "user", "content": shown}
                shown = []
            yield message
            continue
        shown += image_parts(images_of(message["content"]))
        yield {**message, "content": text_of(message["content"])}
    if shown:
        yield {"role": "user", "content": shown}


def labelled_text(content: Content) -> str:
    """A message's content for people who read text, with a label where an image stands."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else part["image"].label for part in content)


def content_of(value: Any, *, folder: Path | None = None) -> Content:
    """A message's content from what a user writes: a text, or a list of texts, images and OpenAI's parts.

    Parts are ``{"type": "text", "text": …}``, ``{"type": "image", "image": …}`` with whatever `Image.of` takes, and
    ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}``. A list of texts only is their text.

    Args:
        value: the content; None is the empty text.
        folder: what relative paths of images start from; by default the current directory.

    Raises:
        UsageError: a part is of another kind, or an image cannot be had.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"The content is {type_of(value)}, where a text or a list of parts is wanted.")
    parts = [_part(part, folder) for part in value]
    return parts if any(part["type"] == "image" for part in parts) else text_of(parts)


def _part(part: Any, folder: Path | None) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image" and "image" in part:
        return {"type": "image", "image": Image.of(part["image"], folder=folder)}
    if kind in ("image_url", "input_image"):
        named = part.get("image_url")
        return {"type": "image", "image": Image.of(named.get("url") if isinstance(named, Mapping) else named)}
    raise UsageError(
        f"A part of the content is {str(part)[:200]!r}. Write {{'type': 'text', 'text': …}} or "
        "{'type': 'image', 'image': …} with an agentfly.Image, a path, or a data URL."
    )


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

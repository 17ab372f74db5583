"""A program's messages in one form, whatever its client library makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import type_of
from agentfly.gateway.json_values import UnfitValue, parsed
from agentfly.gateway.refusal import Refusal
from agentfly.images import Image
from agentfly.messages import Content, ImagePart, Message, Role, TextPart

_ROLES: Mapping[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

IMAGE_PARTS = ("image_url", "input_image")
"""The types of parts that hold an image."""


def read_conversation(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as they came, in the one form in which they are compared and rendered.

    Null content is the empty text, text in parts is one text, the arguments of calls are a mapping, and what neither
    says anything nor is shown to the model is left out.

    Raises:
        Refusal: a message cannot be read, or the conversation ends with the model's own words.
    """
    read = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise Refusal("The last message is the model's own, and cannot be continued. End with one for it to answer.")
    return read


def _message(message: Mapping[str, Any], where: str) -> Message:
    said = message.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Refusal(f"{where}: the role {said!r:.100} is not known; write one of {', '.join(_ROLES)}.")
    read: Message = {"role": role, "content": _content(message.get("content"), where)}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        read["tool_call_id"] = message["tool_call_id"]
    if role in ("tool", "user") and isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise Refusal(f"{where}: the tool_calls are {type_of(calls)}; give a list.")
            read["tool_calls"] = [_call(call, where) for call in calls]
    return read


def _content(content: Any, where: str) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"{where}: the content is {type_of(content)}; give a text or a list of parts.")
    parts = [_part(part, where) for part in content]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def _part(part: Any, where: str) -> TextPart | ImagePart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return {"type": "text", "text": text}
    if kind in IMAGE_PARTS:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if isinstance(url, str) and url.startswith("data:"):
            image = Image.from_url(url)
            image.check()
            return {"type": "image", "image": image}
        raise Refusal(f"{where}: images are fetched from nowhere. Send them as data URLs: data:image/png;base64,…")
    raise Refusal(f"{where}: a part of the type {kind!r:.100} cannot be shown to the model; texts and images can.")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(f"{where}: a tool call has no function with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments or "{}")
        except UnfitValue as error:
            raise Refusal(f"{where}: the text of the arguments of {function['name']!r:.100} {error}.") from None
    if not isinstance(arguments, Mapping | None):
        raise Refusal(f"{where}: the arguments of the call of {function['name']!r:.100} are no JSON object.")
    named = {"name": function["name"], "arguments": dict(arguments or {})}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}

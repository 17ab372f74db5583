"""Conversation: a program's messages in one form, whatever its client library makes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.gateway.wire import Refusal
from agentfly.images import Image
from agentfly.messages import Content, ImagePart, Message, Role, TextPart, text_of

_ROLES: Mapping[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


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


def same_messages(known: Sequence[Message], found: Sequence[Message]) -> bool:
    """Whether what a program shows is what is known. Names and ids are not compared: libraries change them."""
    return len(known) == len(found) and all(map(_same, known, found))


def _same(known: Message, found: Message) -> bool:
    if known["role"] != found["role"]:
        return False
    if known["role"] != "assistant":
        return known["content"] == found["content"]
    calls, shown = _calls_of(known), _calls_of(found)
    if calls != shown:
        return False
    said, repeated = text_of(known["content"]).strip(), text_of(found["content"]).strip()
    return said == repeated or bool(calls and not repeated)  # some libraries drop what was said beside a call


def _calls_of(message: Message) -> list[tuple[Any, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def _message(message: Mapping[str, Any], where: str) -> Message:
    said = message.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Refusal(f"{where}: the role {said!r} is not known; write one of {', '.join(_ROLES)}.")
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
                raise Refusal(f"{where}: the tool_calls are a {type(calls).__name__}; give a list.")
            read["tool_calls"] = [_call(call, where) for call in calls]
    return read


def _content(content: Any, where: str) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"{where}: the content is a {type(content).__name__}; give a text or a list of parts.")
    parts = [_part(part, where) for part in content]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def _part(part: Any, where: str) -> TextPart | ImagePart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return {"type": "text", "text": text}
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if isinstance(url, str) and url.startswith("data:"):
            return {"type": "image", "image": Image.from_url(url)}
        raise Refusal(f"{where}: images are fetched from nowhere. Send them as data URLs: data:image/png;base64,…")
    raise Refusal(f"{where}: a part of the type {kind!r} cannot be shown to the model; texts and images can.")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(f"{where}: a tool call has no function with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what stays a text is refused
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping | None):
        raise Refusal(f"{where}: the arguments of the call of {function['name']!r} are no JSON object.")
    named = {"name": function["name"], "arguments": dict(arguments or {})}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}

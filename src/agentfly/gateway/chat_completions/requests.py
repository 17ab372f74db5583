"""Chat completion requests of OpenAI's API, and their messages in the form that the gateway uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.core.errors import type_of
from agentfly.core.messages import Content, Image, ImagePart, Message, Role, TextPart
from agentfly.gateway.limits import RequestError, UnsupportedValue, parse_json
from agentfly.gateway.model_request import HONORED_PARAMETERS, NEUTRAL_VALUES

MAX_STOPS = 16
"""Maximum number of stop strings. OpenAI allows 4."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ChatCompletionRequest(BaseModel):
    """A request for a chat completion. Fields that do not change the answer are ignored, unsupported ones refused."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: Annotated[str, Field(max_length=1_000)] = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatCompletionRequest:
        """Parse the body of a request.

        Raises:
            RequestError: it is invalid, or uses an unsupported feature.
        """
        try:
            request = cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise RequestError.from_validation_error(error) from None
        for param, why in request.unsupported():
            raise RequestError(f"{param}: {why}", code="unsupported_parameter", param=param)
        return request

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets."""
        named = {name: getattr(self, name) for name in HONORED_PARAMETERS}
        named |= {name: value for name, value in (self.model_extra or {}).items() if name in NEUTRAL_VALUES}
        if self.top_k == -1:
            named["top_k"] = 0  # both take all tokens
        return {name: value for name, value in named.items() if value is not None}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens to sample; None if the request sets none."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def may_call(self) -> bool:
        """Whether tool calls in the answer are parsed."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    def unsupported(self) -> Iterator[tuple[str, str]]:
        """Yield the unsupported parameters that would change the answer, with what to do instead."""
        if self.n not in (None, 1):
            yield "n", f"a call returns only one answer, not {self.n}. Make {self.n} calls, which may run concurrently."
        if self.tool_choice not in (None, "none", "auto"):
            yield (
                "tool_choice",
                "the model decides whether to call a tool and which one: write 'auto' or 'none', or leave it out.",
            )
        if len(self.stops) > MAX_STOPS:
            yield "stop", f"at most {MAX_STOPS} stop strings are allowed, not {len(self.stops)}."
        if self.top_logprobs:
            yield "top_logprobs", "only the log-probs of the sampled tokens are available. Leave it out."
        if (self.response_format or {}).get("type", "text") != "text":
            yield "response_format", "it is not supported. Describe the format in the prompt, and check the answer."
        for param, neutral in _UNSUPPORTED.items():
            found = (self.model_extra or {}).get(param)
            if found is not None and found not in neutral:
                yield param, f"{found!r:.100} is not supported; leave it out."


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "grammar": ("",),
    "json_schema": ({},),
    "regex": ("",),
    "ebnf": ("",),
    "stop_token_ids": ([],),
    "logits_processors": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "web_search_options": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Unsupported parameters, and the values with which they change nothing."""


_ROLES: Mapping[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

IMAGE_PARTS = ("image_url", "input_image")
"""The types of content parts with an image."""


def read_conversation(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert messages to the one form in which they are compared and rendered.

    Null content becomes an empty string, text parts become one string, and arguments of calls become a mapping. Fields
    that are not shown to the model are left out.

    Raises:
        RequestError: a message is invalid, or the last one is an assistant message.
    """
    read = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise RequestError(
            "The last message is an assistant message, which cannot be continued. End with a message to answer."
        )
    return read


def _message(message: Mapping[str, Any], where: str) -> Message:
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RequestError(f"{where}: the role {given!r:.100} is not known; write one of {', '.join(_ROLES)}.")
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
                raise RequestError(f"{where}: the tool_calls are {type_of(calls)}; give a list.")
            read["tool_calls"] = [_call(call, where) for call in calls]
    return read


def _content(content: Any, where: str) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: the content is {type_of(content)}; give a text or a list of parts.")
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
        raise RequestError(f"{where}: images are not fetched. Send them as data URLs: data:image/png;base64,…")
    raise RequestError(f"{where}: parts of the type {kind!r:.100} are not supported; text and images are.")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a tool call has no function with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except UnsupportedValue as error:
            raise RequestError(f"{where}: the text of the arguments of {function['name']!r:.100} {error}.") from None
    if not isinstance(arguments, Mapping | None):
        raise RequestError(f"{where}: the arguments of the call of {function['name']!r:.100} must be a JSON object.")
    named = {"name": function["name"], "arguments": dict(arguments or {})}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}

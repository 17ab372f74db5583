"""ChatCompletions: OpenAI's chat completions as an API of programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.gateway.chat_completions.completion import Completion
from agentfly.gateway.chat_completions.events import event
from agentfly.gateway.chat_completions.messages import IMAGE_PARTS, read_conversation
from agentfly.gateway.chat_completions.request import ChatRequest
from agentfly.gateway.exchange import Pending
from agentfly.gateway.json_values import UnfitValue, chars_in
from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.model_request import ModelRequest
from agentfly.gateway.refusal import Refusal
from agentfly.policies.policy import Tokenizer

_MARKS = (b",", b"[", b"{")


@dataclass(frozen=True)
class ChatCall:
    """A request for a chat completion.

    Attributes:
        asked: the request as it came.
        request: what it asks of the model.
        tokenizer: tells the text of single tokens.
    """

    asked: ChatRequest
    request: ModelRequest
    tokenizer: Tokenizer

    @property
    def streams(self) -> bool:
        """Whether the answer is to be server-sent events."""
        return bool(self.asked.stream)

    def reply(self, answered: Pending) -> Completion:
        """The answer."""
        return Completion(answered, self.asked, self.tokenizer)

    def failed(self, refusal: Refusal) -> bytes:
        """The event that ends a stream which fails late."""
        return event(refusal.to_json())


class ChatCompletions:
    """Reads requests for chat completions.

    Args:
        tokenizer: the model's.
        context_length: the model's context, in tokens.
        limits: what a request may be.
        max_tokens: the most tokens of an answer, also where a program asks for more; None for no limit.
    """

    path = "/chat/completions"

    def __init__(
        self, tokenizer: Tokenizer, *, context_length: int, limits: GatewayLimits, max_tokens: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._limits = limits
        self._max_tokens = max_tokens

    def read(self, body: bytes) -> ChatCall:
        """A request from the body that was sent."""
        marks = sum(map(body.count, _MARKS))
        if marks > self._limits.max_json_marks:
            raise Refusal(
                f"The body holds {marks} commas, brackets and braces, and may hold "
                f"{self._limits.max_json_marks} (max_json_marks). Shorten the conversation.",
                status=413,
            )
        asked = ChatRequest.read(body)
        self._require_fit(asked)
        limits = [limit for limit in (asked.limit, self._max_tokens) if limit is not None]
        request = ModelRequest(
            conversation=read_conversation(asked.messages),
            tools=_definitions(asked.tools or ()),
            sampling=asked.sampling,
            max_tokens=min(limits, default=sys.maxsize),
            stops=asked.stops,
            may_call=asked.may_call,
            max_calls=1 if asked.parallel_tool_calls is False else None,
        )
        return ChatCall(asked, request, self._tokenizer)

    def _require_fit(self, asked: ChatRequest) -> None:
        """Refuse a request of more messages or text than can be, or with values that cannot be rendered."""
        limits = self._limits
        if len(asked.messages) > limits.max_messages:
            raise Refusal(
                f"{len(asked.messages)} messages are more than {limits.max_messages} (max_messages). Shorten the "
                "conversation.",
                param="messages",
            )
        chars = 0
        for param, value in (("messages", _without_images(asked.messages)), ("tools", asked.tools)):
            try:
                chars += chars_in(value)
            except UnfitValue as error:
                raise Refusal(f"{param}: it {error}.", param=param) from None
        allowed = limits.text_chars(self._context_length)
        if chars > allowed:
            raise Refusal(
                f"The conversation has {chars} characters, and {allowed} are the most for the model's context of "
                f"{self._context_length} tokens (max_text_chars). Shorten it.",
                code="context_length_exceeded",
                param="messages",
            )


def _without_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Messages as far as they are text. Images are bounded by the length of the body, and are no text to render."""
    return [{name: _texts(value) if name == "content" else value for name, value in one.items()} for one in messages]


def _texts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS)]


def _definitions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools without what says nothing, so that they are the same however a library writes them."""
    definitions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise Refusal(f"{where} is no function. Give {{'type': 'function', 'function': {{…}}}}.", param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not (isinstance(name, str) and name):
            raise Refusal(f"{where} needs a name.", param="tools")
        if not isinstance(function.get("description"), str | None):
            raise Refusal(f"{where}: the description of {name!r:.100} is no text.", param="tools")
        if not isinstance(parameters, Mapping | None):
            raise Refusal(f"{where}: the parameters of {name!r:.100} are no JSON schema of an object.", param="tools")
        if not isinstance((parameters or {}).get("properties"), Mapping | None):
            raise Refusal(f"{where}: the properties of {name!r:.100} are no JSON object.", param="tools")
        told = {key: value for key, value in function.items() if value is not None and key != "strict"}
        definitions.append({"type": "function", "function": {"description": "", **told}})
    return definitions

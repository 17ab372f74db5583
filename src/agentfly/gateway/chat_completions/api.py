"""OpenAI's chat completions API: responses in one piece or as server-sent events."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.messages import ToolCall, text_of
from agentfly.gateway.call_tree import UnrecordedAnswer
from agentfly.gateway.chat_completions.requests import IMAGE_PARTS, ChatCompletionRequest, read_conversation
from agentfly.gateway.limits import GatewayLimits, RequestError, UnsupportedValue, count_chars
from agentfly.gateway.model_request import ModelRequest
from agentfly.policies.policy import Tokenizer


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event that holds JSON."""
    return f"data: {json.dumps(value)}\n\n".encode()


class ChatCompletionResponse:
    """The answer to a request.

    Args:
        answered: the answer, and what was sent for it.
        asked: the request as it came.
        tokenizer: tells the text of single tokens.
    """

    def __init__(self, answered: UnrecordedAnswer, asked: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._prompt = answered.prompt.ids
        self._answer = answered.answer
        self._tokenizer = tokenizer
        self._about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    def whole(self) -> dict[str, Any]:
        """The completion in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning is not None:
            message["reasoning_content"] = self._reasoning
        if self._answer.calls:
            message["tool_calls"] = [_written(call) for call in self._answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": self._reason, "logprobs": self._logprobs}
        return {
            **self._about,
            "object": "chat.completion",
            "choices": [{**choice, **self._ids("token_ids", self._answer.generation.ids)}],
            "usage": self._usage,
            **self._ids("prompt_token_ids", self._prompt),
        }

    def events(self) -> Iterator[bytes]:
        """The completion as server-sent events. What the chunks hold together is what `whole` says."""
        yield self._chunk({"role": "assistant", "content": ""})
        if self._reasoning is not None:
            yield self._chunk({"reasoning_content": self._reasoning})
        if self._content:
            yield self._chunk({"content": self._content})
        for index, call in enumerate(self._answer.calls):
            yield self._chunk({"tool_calls": [{"index": index, **_written(call)}]})
        told = {"logprobs": self._logprobs, **self._ids("token_ids", self._answer.generation.ids)}
        yield self._chunk({}, finish_reason=self._reason, **told)
        if self._asked.wants_usage:
            yield event({**self._about, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    @property
    def _content(self) -> str | None:
        said = text_of(self._answer.message["content"])
        return said or (None if self._answer.calls else "")

    @property
    def _reasoning(self) -> str | None:
        return self._answer.message.get("reasoning_content")

    @property
    def _reason(self) -> str:
        return "tool_calls" if self._answer.calls else self._answer.generation.finish_reason

    @property
    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self._prompt), len(self._answer.generation.ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    @property
    def _logprobs(self) -> dict[str, Any] | None:
        generation = self._answer.generation
        if not self._asked.logprobs or generation.logprobs is None:
            return None
        return {"content": [self._logprob(*one) for one in zip(generation.ids, generation.logprobs, strict=True)]}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def _ids(self, name: str, ids: Any) -> dict[str, list[int]]:
        return {name: list(ids)} if self._asked.return_token_ids else {}

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
        return event({**self._about, "object": "chat.completion.chunk", "choices": [choice]})


def _written(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


_MARKS = (b",", b"[", b"{")


@dataclass(frozen=True)
class ChatCompletionCall:
    """A request for a chat completion.

    Attributes:
        asked: the request as it came.
        request: what it asks of the model.
        tokenizer: tells the text of single tokens.
    """

    asked: ChatCompletionRequest
    request: ModelRequest
    tokenizer: Tokenizer

    @property
    def streams(self) -> bool:
        """Whether the answer is to be server-sent events."""
        return bool(self.asked.stream)

    def reply(self, answered: UnrecordedAnswer) -> ChatCompletionResponse:
        """The answer."""
        return ChatCompletionResponse(answered, self.asked, self.tokenizer)

    def failed(self, refusal: RequestError) -> bytes:
        """The event that ends a stream which fails late."""
        return event(refusal.to_json())


class ChatCompletionsAPI:
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

    def read(self, body: bytes) -> ChatCompletionCall:
        """A request from the body that was sent."""
        marks = sum(map(body.count, _MARKS))
        if marks > self._limits.max_json_marks:
            raise RequestError(
                f"The body holds {marks} commas, brackets and braces, and may hold "
                f"{self._limits.max_json_marks} (max_json_marks). Shorten the conversation.",
                status=413,
            )
        asked = ChatCompletionRequest.read(body)
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
        return ChatCompletionCall(asked, request, self._tokenizer)

    def _require_fit(self, asked: ChatCompletionRequest) -> None:
        """Refuse a request of more messages or text than can be, or with values that cannot be rendered."""
        limits = self._limits
        if len(asked.messages) > limits.max_messages:
            raise RequestError(
                f"{len(asked.messages)} messages are more than {limits.max_messages} (max_messages). Shorten the "
                "conversation.",
                param="messages",
            )
        chars = 0
        for param, value in (("messages", _without_images(asked.messages)), ("tools", asked.tools)):
            try:
                chars += count_chars(value)
            except UnsupportedValue as error:
                raise RequestError(f"{param}: it {error}.", param=param) from None
        allowed = limits.text_chars(self._context_length)
        if chars > allowed:
            raise RequestError(
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
            raise RequestError(
                f"{where} is no function. Give {{'type': 'function', 'function': {{…}}}}.", param="tools"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not (isinstance(name, str) and name):
            raise RequestError(f"{where} needs a name.", param="tools")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{where}: the description of {name!r:.100} is no text.", param="tools")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(
                f"{where}: the parameters of {name!r:.100} are no JSON schema of an object.", param="tools"
            )
        if not isinstance((parameters or {}).get("properties"), Mapping | None):
            raise RequestError(f"{where}: the properties of {name!r:.100} are no JSON object.", param="tools")
        told = {key: value for key, value in function.items() if value is not None and key != "strict"}
        definitions.append({"type": "function", "function": {"description": "", **told}})
    return definitions

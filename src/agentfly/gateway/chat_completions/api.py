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
    """Return a server-sent event with a JSON value."""
    return f"data: {json.dumps(value)}\n\n".encode()


class ChatCompletionResponse:
    """The answer to a request, in OpenAI's format.

    Args:
        answered: the answer and its prompt.
        asked: the request.
        tokenizer: decodes single tokens.
    """

    def __init__(self, answered: UnrecordedAnswer, asked: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._prompt = answered.prompt.ids
        self._answer = answered.answer
        self._tokenizer = tokenizer
        self._about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    def whole(self) -> dict[str, Any]:
        """Return the completion in one piece."""
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
        """Yield the completion as server-sent events. Together the chunks have the same content as `whole`."""
        yield self._chunk({"role": "assistant", "content": ""})
        if self._reasoning is not None:
            yield self._chunk({"reasoning_content": self._reasoning})
        if self._content:
            yield self._chunk({"content": self._content})
        for index, call in enumerate(self._answer.calls):
            yield self._chunk({"tool_calls": [{"index": index, **_written(call)}]})
        details = {"logprobs": self._logprobs, **self._ids("token_ids", self._answer.generation.ids)}
        yield self._chunk({}, finish_reason=self._reason, **details)
        if self._asked.wants_usage:
            yield event({**self._about, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    @property
    def _content(self) -> str | None:
        content = text_of(self._answer.message["content"])
        return content or (None if self._answer.calls else "")

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
    """A parsed request for a chat completion.

    Attributes:
        asked: the request in OpenAI's format.
        request: the request to the model.
        tokenizer: decodes single tokens.
    """

    asked: ChatCompletionRequest
    request: ModelRequest
    tokenizer: Tokenizer

    @property
    def streams(self) -> bool:
        """Whether the program wants server-sent events."""
        return bool(self.asked.stream)

    def reply(self, answered: UnrecordedAnswer) -> ChatCompletionResponse:
        """Return the response to the answer."""
        return ChatCompletionResponse(answered, self.asked, self.tokenizer)

    def failed(self, refusal: RequestError) -> bytes:
        """Return the event that reports an error in a stream that has begun."""
        return event(refusal.to_json())


class ChatCompletionsAPI:
    """Parses requests for chat completions.

    Args:
        tokenizer: the model's tokenizer.
        context_length: the model's context length in tokens.
        limits: limits of requests.
        max_tokens: maximum number of tokens in an answer, even if a program asks for more; None for no limit.
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
        """Parse the body of a request; see `ProgramAPI.read`."""
        marks = sum(map(body.count, _MARKS))
        if marks > self._limits.max_json_marks:
            raise RequestError(
                f"The body has {marks} commas, brackets and braces; the maximum is {self._limits.max_json_marks} "
                "(max_json_marks). Shorten the conversation.",
                status=413,
            )
        asked = ChatCompletionRequest.read(body)
        self._require_within_limits(asked)
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

    def _require_within_limits(self, asked: ChatCompletionRequest) -> None:
        """Refuse a request with too many messages, too much text, or values that cannot be rendered."""
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
                f"The conversation has {chars} characters; the maximum is {allowed} for the model's context of "
                f"{self._context_length} tokens (max_text_chars). Shorten it.",
                code="context_length_exceeded",
                param="messages",
            )


def _without_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return messages without their images, which are bounded by the length of the body."""
    return [{name: _texts(value) if name == "content" else value for name, value in one.items()} for one in messages]


def _texts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS)]


def _definitions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Check tools and return their definitions in one form, independent of the client library."""
    definitions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise RequestError(
                f"{where} is not a function. Write {{'type': 'function', 'function': {{…}}}}.", param="tools"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not (isinstance(name, str) and name):
            raise RequestError(f"{where} needs a name.", param="tools")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{where}: the description of {name!r:.100} must be a string.", param="tools")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(
                f"{where}: the parameters of {name!r:.100} must be the JSON schema of an object.", param="tools"
            )
        if not isinstance((parameters or {}).get("properties"), Mapping | None):
            raise RequestError(f"{where}: the properties of {name!r:.100} must be a JSON object.", param="tools")
        given = {key: value for key, value in function.items() if value is not None and key != "strict"}
        definitions.append({"type": "function", "function": {"description": "", **given}})
    return definitions

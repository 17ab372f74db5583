"""Completions: an answer as OpenAI's API writes it, in one piece and as a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.gateway.chat_completions.events import event
from agentfly.gateway.chat_completions.request import ChatRequest
from agentfly.gateway.exchange import Pending
from agentfly.messages import ToolCall, text_of
from agentfly.policies.policy import Tokenizer


class Completion:
    """The answer to a request.

    Args:
        answered: the answer, and what was sent for it.
        asked: the request as it came.
        tokenizer: tells the text of single tokens.
    """

    def __init__(self, answered: Pending, asked: ChatRequest, tokenizer: Tokenizer) -> None:
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
        return "tool_calls" if self._answer.calls else self._answer.generation.finish

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

"""Responses of a model API, parsed from JSON and validated."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

from agentfly.core.errors import APIMalformed, type_of
from agentfly.core.gc_tuning import paused_gc

Json = Mapping[str, Any]

MOST_VALUES = 4_000_000
"""Maximum number of commas and opening brackets of an answer. 20 log-probs for each of 20,000 tokens have fewer."""

_MOST_TOKENS = 10**9  # per call; a higher reported usage is wrong, and would count against all other calls


@dataclass(frozen=True)
class Usage:
    """The tokens of a call, as the far side counts them."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class FunctionCall:
    """A model's call of a tool. ``arguments`` is the sampled text, which may not be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatCompletion:
    """The first choice of a chat completion.

    Attributes:
        text: the model's text; empty if it only called tools.
        tool_calls: its tool calls.
        finish_reason: ``stop``, ``length``, ``tool_calls`` or another value of the server; None if absent.
        usage: the tokens of the call; None if the server does not report them.
        model: the model that answered, according to the server.
        raw: the whole answer, including reasoning, log-probs and further choices.
    """

    text: str
    tool_calls: tuple[FunctionCall, ...]
    finish_reason: str | None
    usage: Usage | None
    model: str | None
    raw: Json = field(repr=False, compare=False)


@dataclass(frozen=True)
class TextCompletion:
    """The first choice of an answer to a prompt.

    Attributes:
        text: the sampled text.
        token_ids: the sampled ids; None if the server does not send them. vLLM does when it is asked
            for with ``return_token_ids=True``.
        prompt_token_ids: the ids of the prompt, likewise.
        token_logprobs: the log-prob of each sampled token, if asked for with ``logprobs=…``.
        finish_reason, usage, model, raw: as in `ChatCompletion`.
    """

    text: str
    token_ids: tuple[int, ...] | None
    prompt_token_ids: tuple[int, ...] | None
    token_logprobs: tuple[float | None, ...] | None
    finish_reason: str | None
    usage: Usage | None
    model: str | None
    raw: Json = field(repr=False, compare=False)


def read_json(body: bytes) -> Json:
    """Parse the JSON object in the body of an answer.

    Raises:
        APIMalformed: it is something else, or may have more than `MOST_VALUES`, which would block the event loop. NaN
            and infinities are no JSON (RFC 8259, section 6).
    """
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise APIMalformed(f"has more than {MOST_VALUES:,} commas and brackets, and begins with {_excerpt(body)}")
    try:
        with paused_gc():
            found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise APIMalformed(f"is not JSON but begins with {_excerpt(body)}") from None
    if not isinstance(found, dict):
        raise APIMalformed(f"is JSON, but {type_of(found)} where an object belongs: {_excerpt(body)}")
    return found


def read_chat(answer: Json) -> ChatCompletion:
    """Return the chat completion in an answer.

    Raises:
        APIMalformed: the answer is not one.
    """
    choice = _first_choice(answer)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise APIMalformed(f"has no message in its first choice: {_excerpt(answer)}")
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    if not isinstance(content, str | None) or not isinstance(calls, list | tuple):
        raise APIMalformed(f"has a message that is neither text nor tool calls: {_excerpt(answer)}")
    return ChatCompletion(
        text=content or "",
        tool_calls=tuple(_function_call(call) for call in calls),
        finish_reason=_text_or_none(choice, "finish_reason"),
        usage=read_usage(answer),
        model=_text_or_none(answer, "model"),
        raw=answer,
    )


def read_completion(answer: Json) -> TextCompletion:
    """Return the text completion in an answer.

    Raises:
        APIMalformed: the answer is not one.
    """
    choice = _first_choice(answer)
    text = choice.get("text")
    if not isinstance(text, str):
        raise APIMalformed(f"has no text in its first choice: {_excerpt(answer)}")
    logprobs = choice.get("logprobs")
    prompt_ids = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
    return TextCompletion(
        text=text,
        token_ids=_ids(choice.get("token_ids"), "token_ids"),
        prompt_token_ids=_ids(prompt_ids, "prompt_token_ids"),
        token_logprobs=_logprobs(logprobs.get("token_logprobs")) if isinstance(logprobs, dict) else None,
        finish_reason=_text_or_none(choice, "finish_reason"),
        usage=read_usage(answer),
        model=_text_or_none(answer, "model"),
        raw=answer,
    )


def read_models(answer: Json) -> tuple[str, ...]:
    """The names of the models that an endpoint serves.

    Raises:
        APIMalformed: the answer is not a list of models.
    """
    listed = answer.get("data")
    if not isinstance(listed, list) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), str) for one in listed
    ):
        raise APIMalformed(f"is no list of models: {_excerpt(answer)}")
    return tuple(one["id"] for one in listed)


def read_usage(answer: Json) -> Usage | None:
    """Return the usage that an answer reports; None if it reports none, or an impossible one."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    if not (_is_count(prompt) and _is_count(completion) and prompt + completion <= _MOST_TOKENS):
        return None
    return Usage(prompt, completion)


def _first_choice(answer: Json) -> Json:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise APIMalformed(f"has no choices: {_excerpt(answer)}")
    first: Json = choices[0]
    return first


def _function_call(call: Any) -> FunctionCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIMalformed(f"has a tool call without a name: {_excerpt(call)}")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return FunctionCall(str(call.get("id") or ""), function["name"], text)


def _ids(found: Any, name: str) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(_is_count(one) for one in found):
        raise APIMalformed(f"has {name} that are no token ids: {_excerpt(found)}")
    return tuple(found)


def _logprobs(found: Any) -> tuple[float | None, ...] | None:
    if found is None:
        return None
    # The first token of an echoed prompt has none.
    if not isinstance(found, list) or not all(one is None or _is_finite(one) for one in found):
        raise APIMalformed(f"has token_logprobs that are no numbers: {_excerpt(found)}")
    return tuple(None if one is None else float(one) for one in found)


def _text_or_none(found: Json, name: str) -> str | None:
    value = found.get(name)
    return value if isinstance(value, str) else None


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _excerpt(found: Any) -> str:
    text = found[:1000].decode("utf-8", errors="replace") if isinstance(found, bytes) else _SHORT.repr(found)
    return repr(text[:200]) if text else "nothing at all"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 4, 10, 10, 200


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

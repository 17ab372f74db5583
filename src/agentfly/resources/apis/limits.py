"""Limits: how much of a model API may be used, by everybody on this host together."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import UsageError

BYTES_PER_TOKEN = 3
"""Of text, at least: tokenizers of today make four of English and three of code, and the guess must not be too low."""

MESSAGE_TOKENS = 8
IMAGE_TOKENS = 1_500
DEFAULT_COMPLETION_TOKENS = 1_024
"""What an answer is guessed to take when the call does not limit it."""


@dataclass(frozen=True)
class RateLimits:
    """What may be used of an endpoint.

    Attributes:
        max_concurrency: calls that are open at a time.
        requests: requests in any window; None for any number.
        tokens: tokens of prompts and answers in any window; None for any number.
        window_s: the length of a window, in seconds.
    """

    max_concurrency: int
    requests: int | None = None
    tokens: int | None = None
    window_s: float = 60.0


def estimate_tokens(body: Mapping[str, Any]) -> int:
    """The most tokens that a request is likely to take: its prompt, and as many as it allows each answer.

    Raises:
        UsageError: a number of tokens or answers is none, or the prompt has no end.
    """
    prompt = body.get("messages", body.get("prompt", ""))
    named = next((name for name in ("max_completion_tokens", "max_tokens") if body.get(name)), "")
    answers = _whole(body, "n", 1) * _whole(body, named, DEFAULT_COMPLETION_TOKENS)
    try:
        return _tokens_in(prompt) + _tokens_in(body.get("tools", "")) + answers
    except RecursionError:
        raise UsageError("The messages, the prompt or the tools of a call are nested too deeply to be sent.") from None


def _whole(body: Mapping[str, Any], name: str, otherwise: int) -> int:
    try:
        return max(0, operator.index(body.get(name) or otherwise))
    except TypeError:
        raise UsageError(f"{name}={body[name]!r}: write a whole number, without quotes.") from None


def _tokens_in(part: Any) -> int:
    if isinstance(part, str):
        return -(-len(part.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)
    if isinstance(part, Mapping):
        if "image" in str(part.get("type", "")):
            return IMAGE_TOKENS
        return MESSAGE_TOKENS + sum(_tokens_in(name) + _tokens_in(value) for name, value in part.items())
    if isinstance(part, Sequence) and not isinstance(part, bytes):
        return sum(map(_tokens_in, part))
    return 1  # a token id, a number

"""Limits on what programs may send and use, and the errors for requests that exceed them.

Programs are not trusted: one program must not block the others. JSON values have a bounded depth, finite numbers and
valid characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pydantic_core
from pydantic import ValidationError

from agentfly.core.errors import AgentFlyError, ConfigError, PromptTooLong, UsageError, describe_error
from agentfly.core.truncation import truncate_middle

MESSAGE_CHARS = 1_500


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        code: what programs tell errors apart by.
        param: the parameter that is to blame.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @classmethod
    def from_exception(cls, error: Exception) -> RequestError:
        """What a program is told of a failure. One that the machine is to blame for is a 500, which clients retry."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, PromptTooLong):
            return cls(str(error), code="context_length_exceeded", param="messages")
        if isinstance(error, UsageError):
            return cls(str(error))
        if isinstance(error, UnicodeError):
            return cls(f"The conversation holds characters that are no text: {error}.", param="messages")
        return cls(str(error) if isinstance(error, AgentFlyError) else describe_error(error), status=500)

    @classmethod
    def from_validation_error(cls, error: ValidationError) -> RequestError:
        """What is told of a body that is not what it should be."""
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, problem["loc"]))[:200] or None
        return cls(f"{param or 'The body'}: {problem['msg']:.500}.", param=param)

    def to_json(self) -> dict[str, Any]:
        """The error as OpenAI writes one."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = truncate_middle(str(self), MESSAGE_CHARS)  # what was refused may be long, and part of the message
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


CHARS_PER_TOKEN = 16
"""A conversation of more characters than this for each token of the model's context is not even tokenized."""

MAX_DEPTH = 64
"""Values in a request that lie deeper in one another than this are refused."""


@dataclass(frozen=True)
class GatewayLimits:
    """Bounds on what programs can ask of the gateway. What exceeds one is refused with the name of the limit.

    Together they bound the time that a request can hold up the event loop. What takes longer than milliseconds is done
    on a thread, for one request of a rollout at a time.

    Attributes:
        max_open_rollouts: rollouts that may be open at a time.
        max_body_bytes: length of a request. It holds for what the harness sends, too.
        max_body_seconds: time in which a request must have arrived, from its header on.
        max_json_marks: commas, brackets and braces in a request, those in texts included. They bound the number of its
            values, and so the time that it takes to read.
        max_messages: messages in a request.
        max_text_chars: characters of all texts in a request, images not counted; None for 16 a token of the model's
            context.
        max_concurrent_calls: calls of a rollout that may be answered at a time.
        max_pending_bytes: length of all requests of a rollout that are being answered.
        max_calls: calls of a rollout that are answered in all. The rollout then ends as ``max_turns``.
        max_record_bytes: memory that the record of a rollout takes, about. The rollout then ends as ``max_turns``, too.

    Raises:
        ConfigError: a limit is no number above 0.
    """

    max_open_rollouts: int = 10_000
    max_body_bytes: int = 32 * 2**20
    max_body_seconds: float = 60.0
    max_json_marks: int = 250_000
    max_messages: int = 4_096
    max_text_chars: int | None = None
    max_concurrent_calls: int = 128
    max_pending_bytes: int = 128 * 2**20
    max_calls: int = 1_000
    max_record_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_text_chars":
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            seconds = field.name == "max_body_seconds" and isinstance(value, float) and math.isfinite(value)
            if not (whole or seconds) or value <= 0:
                kind = "number" if field.name == "max_body_seconds" else "whole number"
                raise ConfigError(f"GatewayLimits({field.name}={value!r}): it must be a {kind} above 0.")

    def text_chars(self, context_length: int) -> int:
        """The most characters of a request to a model with this context length."""
        return self.max_text_chars if self.max_text_chars is not None else CHARS_PER_TOKEN * context_length


class RolloutQuota:
    """What the program of one rollout has taken of what it may.

    Attributes:
        record_bytes: memory that the record takes, about.
        exhausted: the limit on the whole rollout for which the last call was refused; empty if it was not.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        self.record_bytes = 0
        self.exhausted = ""
        self._limits = limits
        self._calls = 0
        self._bytes = 0
        self._answered = 0  # and those that are being answered

    @contextmanager
    def call(self, size: int) -> Iterator[None]:
        """A call is answered within, whose request has ``size`` bytes.

        Raises:
            RequestError: as many are being answered as may be.
        """
        limits = self._limits
        if self._calls >= limits.max_concurrent_calls:
            raise RequestError(
                f"{self._calls} calls of this rollout are being answered (max_concurrent_calls). Wait for some.",
                status=429,
            )
        if self._bytes + size > max(limits.max_pending_bytes, limits.max_body_bytes):
            raise RequestError(
                f"The calls of this rollout that are being answered have {self._bytes} bytes, and {size} more are too "
                f"many (max_pending_bytes={limits.max_pending_bytes}). Wait for some.",
                status=429,
            )
        self._calls += 1
        self._bytes += size
        try:
            yield
        finally:
            self._calls -= 1
            self._bytes -= size

    @contextmanager
    def answer(self) -> Iterator[None]:
        """A call is answered within, unless that fails, and its answer goes on the record.

        Raises:
            RequestError: the record of the rollout is as large as it may become.
        """
        limits, told = self._limits, ""
        if self._answered >= limits.max_calls:
            told = f"{self._answered} calls of the rollout were answered, which is the most (max_calls)."
        elif self.record_bytes >= limits.max_record_bytes:
            told = f"The rollout's record of {self.record_bytes} bytes is full (max_record_bytes)."
        self.exhausted = told
        if told:
            raise RequestError(told, code="rollout_full")
        self._answered += 1
        try:
            yield
        except BaseException:
            self._answered -= 1
            raise


class UnsupportedValue(ValueError):
    """A JSON value that cannot be taken; the message says why."""


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        UnfitValue: it is no JSON, or a value that cannot be taken.
    """
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise UnsupportedValue(f"is no JSON ({error})") from None
    count_chars(value)
    return value


def count_chars(value: Any) -> int:
    """How many characters the texts in a value have, the keys of objects included.

    Raises:
        UnfitValue: it lies too deep, or holds a number that is not finite or a text that is none.
    """
    count = 0
    ahead: list[tuple[Any, int]] = [(value, 1)]
    while ahead:
        one, depth = ahead.pop()
        if isinstance(one, str):
            count += len(one)
            if not one.isascii():
                _require_text(one)
        elif isinstance(one, Mapping | list | tuple):
            if depth > MAX_DEPTH:
                raise UnsupportedValue(f"has values more than {MAX_DEPTH} deep in one another")
            if isinstance(one, Mapping):
                ahead.extend((key, depth + 1) for key in one)
            ahead.extend((part, depth + 1) for part in (one.values() if isinstance(one, Mapping) else one))
        elif isinstance(one, float) and one - one != 0:
            raise UnsupportedValue(f"holds the number {one}, which JSON does not have")
        elif isinstance(one, int) and one.bit_length() > 4_096:
            raise UnsupportedValue("holds a whole number of more than a thousand digits")
    return count


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValue(f"holds half a character ({error.reason})") from None

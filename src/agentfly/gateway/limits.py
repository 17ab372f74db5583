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
        code: identifies the kind of error for programs.
        param: the invalid parameter.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @classmethod
    def from_exception(cls, error: Exception) -> RequestError:
        """Convert a failure to the error for the program. Failures of the machine get status 500, so clients retry."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, PromptTooLong):
            return cls(str(error), code="context_length_exceeded", param="messages")
        if isinstance(error, UsageError):
            return cls(str(error))
        if isinstance(error, UnicodeError):
            return cls(f"The conversation holds invalid characters: {error}.", param="messages")
        return cls(str(error) if isinstance(error, AgentFlyError) else describe_error(error), status=500)

    @classmethod
    def from_validation_error(cls, error: ValidationError) -> RequestError:
        """Convert the first error of an invalid body."""
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, problem["loc"]))[:200] or None
        return cls(f"{param or 'The body'}: {problem['msg']:.500}.", param=param)

    def to_json(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = truncate_middle(str(self), MESSAGE_CHARS)  # the message may quote a long value
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


CHARS_PER_TOKEN = 16
"""A conversation with more characters per token of the model's context than this is refused without tokenizing it."""

MAX_DEPTH = 64
"""Maximum nesting depth of values in a request."""


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of programs. A request that exceeds one is refused, and the error names the limit.

    Together they bound the time for which a request can block the event loop. Work of more than milliseconds runs on a
    thread, for one request of a rollout at a time.

    Attributes:
        max_open_rollouts: maximum number of open rollouts.
        max_body_bytes: maximum length of a request, of the harness or a program.
        max_body_seconds: time in which the body of a request must arrive.
        max_json_marks: maximum number of commas, brackets and braces in a request, those in strings included. It
            bounds the number of values, and so the time to parse them.
        max_messages: maximum number of messages in a request.
        max_text_chars: maximum number of characters in all texts of a request, images not counted; None for 16 per
            token of the model's context.
        max_concurrent_calls: maximum number of concurrent calls of a rollout.
        max_pending_bytes: maximum total length of the requests of a rollout that are being answered.
        max_calls: maximum number of answered calls of a rollout. The rollout then ends as ``max_turns``.
        max_record_bytes: approximate memory limit of a rollout's record. The rollout then ends as ``max_turns``, too.

    Raises:
        ConfigError: a limit is not a number above 0.
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
        """Return the maximum number of characters in a request to a model with this context length."""
        return self.max_text_chars if self.max_text_chars is not None else CHARS_PER_TOKEN * context_length


class RolloutQuota:
    """The use that one rollout's program has made of its limits.

    Attributes:
        record_bytes: approximate memory of the record.
        exhausted: why the last call was refused, if a limit of the whole rollout is reached; else empty.
    """

    def __init__(self, limits: GatewayLimits) -> None:
        self.record_bytes = 0
        self.exhausted = ""
        self._limits = limits
        self._calls = 0
        self._bytes = 0
        self._answered = 0  # calls answered or being answered

    @contextmanager
    def call(self, size: int) -> Iterator[None]:
        """Count a call as running inside the block. Its request has ``size`` bytes.

        Raises:
            RequestError: too many calls, or bytes of them, are being answered.
        """
        limits = self._limits
        if self._calls >= limits.max_concurrent_calls:
            raise RequestError(
                f"{self._calls} calls of this rollout are being answered (max_concurrent_calls). Wait for some.",
                status=429,
            )
        if self._bytes + size > max(limits.max_pending_bytes, limits.max_body_bytes):
            raise RequestError(
                f"The running calls of this rollout have {self._bytes} bytes, and {size} more exceed the limit "
                f"(max_pending_bytes={limits.max_pending_bytes}). Wait for some.",
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
        """Count a call as answered when the ``with`` block ends without an error.

        Raises:
            RequestError: the rollout has reached its maximum number of calls or size of the record.
        """
        limits, reason = self._limits, ""
        if self._answered >= limits.max_calls:
            reason = f"{self._answered} calls of the rollout were answered, the maximum (max_calls)."
        elif self.record_bytes >= limits.max_record_bytes:
            reason = f"The rollout's record of {self.record_bytes} bytes is full (max_record_bytes)."
        self.exhausted = reason
        if reason:
            raise RequestError(reason, code="rollout_full")
        self._answered += 1
        try:
            yield
        except BaseException:
            self._answered -= 1
            raise


class UnsupportedValue(ValueError):
    """A JSON value that the gateway does not accept; the message says why."""


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        UnsupportedValue: it is invalid, or its value is not accepted.
    """
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise UnsupportedValue(f"is not valid JSON ({error})") from None
    count_chars(value)
    return value


def count_chars(value: Any) -> int:
    """Return the number of characters in all strings of a value, keys of objects included.

    Raises:
        UnsupportedValue: it is nested too deeply, or holds a number that is not finite or an invalid string.
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
                raise UnsupportedValue(f"has values nested more than {MAX_DEPTH} deep")
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

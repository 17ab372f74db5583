"""GatewayLimits: what programs may take of the gateway. They are not trusted: one must not hold up the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from agentfly.errors import ConfigError

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

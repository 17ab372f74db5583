"""Allowance: what a rollout's program has taken of what it may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.refusal import Refusal


class Allowance:
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
            Refusal: as many are being answered as may be.
        """
        limits = self._limits
        if self._calls >= limits.max_concurrent_calls:
            raise Refusal(
                f"{self._calls} calls of this rollout are being answered (max_concurrent_calls). Wait for some.",
                status=429,
            )
        if self._bytes + size > max(limits.max_pending_bytes, limits.max_body_bytes):
            raise Refusal(
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
            Refusal: the record of the rollout is as large as it may become.
        """
        limits, told = self._limits, ""
        if self._answered >= limits.max_calls:
            told = f"{self._answered} calls of the rollout were answered, which is the most (max_calls)."
        elif self.record_bytes >= limits.max_record_bytes:
            told = f"The rollout's record of {self.record_bytes} bytes is full (max_record_bytes)."
        self.exhausted = told
        if told:
            raise Refusal(told, code="rollout_full")
        self._answered += 1
        try:
            yield
        except BaseException:
            self._answered -= 1
            raise

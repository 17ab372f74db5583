"""RetryingCaller: makes a call within its endpoint's limits, and retries it while a retry may succeed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from agentfly.core.errors import (
    AcquireTimeout,
    APIMalformed,
    APIRateLimited,
    APIRefused,
    APIUnavailable,
    ModelAPIError,
    UsageError,
)
from agentfly.resources.model_api.rate_limiter import Permit, RateLimiter
from agentfly.resources.model_api.responses import ChatCompletion, TextCompletion

C = TypeVar("C", ChatCompletion, TextCompletion)

logger = logging.getLogger(__name__)

_TOLD_AGAIN_S = 30.0
"""Minimum seconds between two log messages about the same number of failed attempts."""

MAX_RETRY_AFTER_S = 3600.0
"""Maximum seconds of a ``Retry-After`` to wait before the endpoint is called again."""


@dataclass(frozen=True)
class RetryPolicy:
    """Number and timing of retries.

    Attributes:
        max_retries: further tries after the first.
        call_timeout_s: seconds from the first try until all tries must have ended.
        wait_s: maximum number of seconds that a call waits for its first turn.
        initial_backoff_s: approximate pause before the second try; it doubles with each try.
        max_backoff_s: maximum pause.
    """

    max_retries: int
    call_timeout_s: float
    wait_s: float
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 20.0

    def pause_s(self, tries: int, chance: float) -> float:
        """Return the pause in seconds after this many tries: between half and all of the backoff.

        Args:
            tries: at least 1.
            chance: from 0 to 1. It spreads calls that failed together.
        """
        full = min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** min(tries - 1, 60))
        return full * (1 + chance) / 2


class RetryingCaller:
    """Makes calls within the limits of one endpoint, and retries them while a retry may succeed.

    Args:
        gate: lets calls through.
        retries: the number of retries and their delays.
        chance: numbers from 0 to 1, for the pauses.
    """

    def __init__(self, gate: RateLimiter, retries: RetryPolicy, *, chance: Callable[[], float] = random.random) -> None:
        self._gate = gate
        self._retries = retries
        self._chance = chance
        self._told = 0  # the highest logged number of attempts since the last success
        self._told_at = 0.0
        self._said = ""

    async def call(self, send: Callable[[float], Awaitable[C]], tokens: int) -> C:
        """Return the result of ``send`` from its first successful try.

        A refused call is not tried again. Other failures are retried until the deadline or the maximum number of tries.

        Args:
            send: makes the call, given its time limit in seconds.
            tokens: number of tokens that it may use.

        Raises:
            AcquireTimeout: its turn did not come in time.
            ModelAPIError: the failure of the last try.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retries.call_timeout_s
        failure: ModelAPIError | None = None
        tries = 0
        while True:
            left = deadline - loop.time()
            wait_s = self._retries.wait_s if failure is None else left
            try:
                async with self._gate.permit(tokens, wait_s=wait_s, call_s=left, again=failure is not None) as passage:
                    if failure is None:
                        deadline = loop.time() + self._retries.call_timeout_s  # waiting for the first turn is free
                    tries += 1
                    answer = await _report_outcome(send(max(0.0, deadline - loop.time())), passage)
                    self._told, self._said = 0, ""
                    return answer
            except AcquireTimeout:
                if failure is None:
                    raise
            except APIRefused:
                raise
            except ModelAPIError as error:
                failure = error
            if not await self._pause(failure, tries, deadline - loop.time()):
                break
        told = f"{failure} (Tries: {tries}, within a call_timeout_s of {self._retries.call_timeout_s:g} s.)"
        raise type(failure)(told, status=failure.status, retry_after_s=failure.retry_after_s)

    async def _pause(self, failure: ModelAPIError, tries: int, left: float) -> bool:
        """Wait before the next attempt. Return False if there is none."""
        # If the server gives a time, the rate limiter waits for it, for all calls together, and admits them in order.
        own = 0.0 if failure.retry_after_s is not None else self._retries.pause_s(tries, self._chance())
        if tries > self._retries.max_retries or max(own, failure.retry_after_s or 0.0) >= left:
            return False
        self._tell(failure, tries, max(own, failure.retry_after_s or 0.0))
        await asyncio.sleep(own)
        return True

    def _tell(self, failure: ModelAPIError, tries: int, pause_s: float) -> None:
        """Log a retry: once per number of attempts, regardless of the number of failing calls."""
        now = asyncio.get_running_loop().time()
        if tries > self._told or now >= self._told_at + _TOLD_AGAIN_S:
            said = "The call failed in the same way again." if str(failure) == self._said else str(failure)
            self._told, self._told_at, self._said = max(tries, self._told), now, str(failure)
            logger.warning(
                "%s (Try %d of %d; the next in %.1f s.)", said, tries, self._retries.max_retries + 1, pause_s
            )


async def _report_outcome(sending: Awaitable[C], passage: Permit) -> C:
    """Report a call's outcome to its permit."""
    try:
        completion = await sending
    except UsageError:
        passage.was_sent = False
        raise
    except (APIRateLimited, APIRefused) as error:
        passage.tokens = 0  # the far side did nothing for it
        passage.outcome = "slow down" if isinstance(error, APIRateLimited) else "failed"
        passage.pause_s = _capped_retry_after(error)
        raise
    except (APIUnavailable, APIMalformed) as error:
        passage.pause_s = _capped_retry_after(error)
        raise
    passage.outcome = "done"
    passage.tokens = None if completion.usage is None else completion.usage.total_tokens
    return completion


def _capped_retry_after(error: ModelAPIError) -> float | None:
    return None if error.retry_after_s is None else min(error.retry_after_s, MAX_RETRY_AFTER_S)

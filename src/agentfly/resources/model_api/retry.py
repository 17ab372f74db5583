"""RetryingCaller: makes a call within its endpoint's limits, and retries it while that may help."""

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
"""Seconds after which a failure is told once more, though a call has failed as often before."""

MAX_RETRY_AFTER_S = 3600.0
"""Seconds of a ``Retry-After`` that are believed at a time. After them the endpoint is asked again."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how soon a call is made again.

    Attributes:
        max_retries: further tries after the first.
        call_timeout_s: seconds from the first sending in which all tries must end.
        wait_s: seconds that a call may wait for its first turn.
        initial_backoff_s: the pause before the second try, about; it doubles with each.
        max_backoff_s: no pause is longer.
    """

    max_retries: int
    call_timeout_s: float
    wait_s: float
    initial_backoff_s: float = 0.5
    max_backoff_s: float = 20.0

    def pause_s(self, tries: int, chance: float) -> float:
        """Seconds to wait after so many tries: between half and all of what doubles with each.

        Args:
            tries: at least 1.
            chance: from 0 to 1. It keeps calls that failed together from coming back together.
        """
        full = min(self.max_backoff_s, self.initial_backoff_s * 2.0 ** min(tries - 1, 60))
        return full * (1 + chance) / 2


class RetryingCaller:
    """Makes calls under the limits of one endpoint, and again as long as that may help.

    Args:
        gate: lets calls through.
        retries: how often and how soon.
        chance: numbers from 0 to 1, for the pauses.
    """

    def __init__(self, gate: RateLimiter, retries: RetryPolicy, *, chance: Callable[[], float] = random.random) -> None:
        self._gate = gate
        self._retries = retries
        self._chance = chance
        self._told = 0  # the most tries of a call that were told of since a call went well
        self._told_at = 0.0
        self._said = ""

    async def call(self, send: Callable[[float], Awaitable[C]], tokens: int) -> C:
        """What ``send`` returns, at the first try that goes well.

        What was refused is not tried again. Anything else is, until the deadline or the number of tries is reached.

        Args:
            send: makes the call within so many seconds.
            tokens: what it may take.

        Raises:
            AcquireTimeout: its turn did not come in time.
            ModelAPIError: why the last try failed.
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
        """Wait as long as is right before the next try; False if there is none any more."""
        # Where the far side says when, the gate waits for it, for all calls together, and lets them through in order.
        own = 0.0 if failure.retry_after_s is not None else self._retries.pause_s(tries, self._chance())
        if tries > self._retries.max_retries or max(own, failure.retry_after_s or 0.0) >= left:
            return False
        self._tell(failure, tries, max(own, failure.retry_after_s or 0.0))
        await asyncio.sleep(own)
        return True

    def _tell(self, failure: ModelAPIError, tries: int, pause_s: float) -> None:
        """Say that a call is made again: once for each number of tries, however many calls fail together."""
        now = asyncio.get_running_loop().time()
        if tries > self._told or now >= self._told_at + _TOLD_AGAIN_S:
            said = "The call failed in the same way again." if str(failure) == self._said else str(failure)
            self._told, self._told_at, self._said = max(tries, self._told), now, str(failure)
            logger.warning(
                "%s (Try %d of %d; the next in %.1f s.)", said, tries, self._retries.max_retries + 1, pause_s
            )


async def _report_outcome(sending: Awaitable[C], passage: Permit) -> C:
    """What comes of a call; the passage is told what it says of the far side."""
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

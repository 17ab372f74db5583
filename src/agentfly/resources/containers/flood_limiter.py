"""FloodLimiter: a token bucket for the unrequested output of a sandbox."""

from __future__ import annotations

import time
from collections.abc import Callable


class FloodLimiter:
    """A token bucket that a sandbox's reports spend. It refills with time and with each request.

    A shell reports little: a few words for each command, and a few more when a part of it restarts after a kill. A
    sandbox
    that exceeds the limit is treated as an attack on the host.
    """

    def __init__(
        self, least: float, *, per_second: float, per_request: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with `least` tokens. Time refills the bucket up to that; requests fill it up to four times that.

        Args:
            least: the initial amount.
            per_second: tokens added per second.
            per_request: tokens added per request.
            clock: seconds.
        """
        self._least, self._most = least, 4 * least
        self._per_second, self._per_request = per_second, per_request
        self._clock = clock
        self._left = least
        self._looked = clock()

    def add_request(self) -> None:
        """Add the tokens of one request, which the sandbox may answer."""
        if self._left < self._most:
            self._left = min(self._left + self._per_request, self._most)

    def spend(self, amount: float) -> bool:
        """Spend an amount; False if there are not enough tokens."""
        if amount > self._left:  # only then is it of interest how much it has grown, which is asked for each command
            now = self._clock()
            grown = min(self._left + (now - self._looked) * self._per_second, self._least)
            self._left, self._looked = max(self._left, grown), now
        self._left -= amount
        return self._left >= 0

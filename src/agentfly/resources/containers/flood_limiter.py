"""Allowance: how much a sandbox may say that nobody asked for."""

from __future__ import annotations

import time
from collections.abc import Callable


class FloodLimiter:
    """An amount that is used up by what a sandbox says, and grows with what it is asked and with time.

    A shell says little: a few words for each command, and a few when a part of it was killed and begins anew. So
    whoever uses up an allowance for more than that means to keep the host busy.
    """

    def __init__(
        self, least: float, *, per_second: float, per_request: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with `least`, which it grows back to with time. Requests let it grow to four times that.

        Args:
            least: the amount that there is to begin with. Twice as much may be used up at once after a long time.
            per_second: by how much it grows in a second.
            per_request: by how much it grows with each thing asked.
            clock: seconds.
        """
        self._least, self._most = least, 4 * least
        self._per_second, self._per_request = per_second, per_request
        self._clock = clock
        self._left = least
        self._looked = clock()

    def add_request(self) -> None:
        """The sandbox was asked for something, so it may answer."""
        if self._left < self._most:
            self._left = min(self._left + self._per_request, self._most)

    def spend(self, amount: float) -> bool:
        """Use up an amount; False if there is not so much left."""
        if amount > self._left:  # only then is it of interest how much it has grown, which is asked for each command
            now = self._clock()
            grown = min(self._left + (now - self._looked) * self._per_second, self._least)
            self._left, self._looked = max(self._left, grown), now
        self._left -= amount
        return self._left >= 0

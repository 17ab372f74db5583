"""Latency: how long the calls of a workload take, drawn from a seeded generator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol


class Latency(Protocol):
    """A distribution of seconds."""

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Anything from ``low`` to ``high`` seconds, alike."""

    low: float
    high: float

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """Most calls near ``median`` seconds, a few far longer, none above ``cap``.

    Args:
        median: half of the calls are shorter, in seconds.
        cap: the longest, in seconds.
        spread: standard deviation of the logarithm. 1 puts one call in a hundred above ten times the median.
    """

    median: float
    cap: float
    spread: float = 1.0

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        return min(generator.lognormvariate(math.log(self.median), self.spread), self.cap)

"""Spread: what the seeds of an arm have in common, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantiles of Student's t with 1 to 9 degrees of freedom."""
_T_BEYOND = 2.262
"""For more degrees of freedom than those: never too small."""


@dataclass(frozen=True)
class Spread:
    """Values of some runs.

    Attributes:
        mean, low, high: their mean, the least and the greatest.
        margin: half the width of the 95 % interval of the mean by Student's t, as if the runs were drawn from a normal
            distribution; None for fewer than two.
        count: how many they are.
    """

    mean: float
    low: float
    high: float
    margin: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(fmean(values), min(values), max(values), _margin(values), len(values))


def _margin(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    quantile = _T[len(values) - 2] if len(values) - 2 < len(_T) else _T_BEYOND
    return quantile * stdev(values) / math.sqrt(len(values))

"""Spread: what the seeds of an arm have in common, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from agentfly.evaluation.statistics import student_t_quantile


@dataclass(frozen=True)
class SeedSpread:
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
    def of(cls, values: Sequence[float]) -> SeedSpread:
        """The spread of at least one value."""
        return cls(fmean(values), min(values), max(values), _margin(values), len(values))


def _margin(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return student_t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))

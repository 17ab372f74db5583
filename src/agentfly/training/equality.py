"""Equality of numbers that have been computed: rewards that differ by rounding alone are the same."""

from __future__ import annotations

ROUNDING = 1e-9
"""Numbers that differ by less than this share of the largest are equal: the rest is rounding, and dividing by their
standard deviation would make it as large as a real difference."""


def are_equal(lowest: float, highest: float) -> bool:
    """Whether numbers from ``lowest`` to ``highest`` are all equal."""
    return highest - lowest <= ROUNDING * max(abs(lowest), abs(highest))

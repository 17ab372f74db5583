"""Curves in text: a sparkline of one row, and a chart of several.

Numbers with their nouns, as they are read out: one step, two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The values as one row of bars of at most ``width`` characters, scaled to their own range."""
    if not values:
        return ""
    columns = _resampled(values, width)
    low, high = min(columns), max(columns)
    if high == low:
        return _EIGHTHS[4] * len(columns)
    return "".join(_EIGHTHS[1 + round(7 * (value - low) / (high - low))] for value in columns)


def bar_chart(values: Sequence[float], *, width: int = 60, height: int = 8) -> str:
    """The values as a chart of filled columns with its range at the left and its steps, counted from 1, below.

    The scale runs from 0, or from the least value where that is negative, to the greatest value.
    """
    if not values:
        return "(no values yet)"
    wide = max(1, width // len(values))  # a short run fills the width too
    columns = [value for value in _resampled(values, width) for _ in range(wide)]
    low, high = min(0.0, *columns), max(0.0, *columns)
    span = (high - low) or 1.0
    filled = [round(8 * height * (value - low) / span) for value in columns]
    lines = []
    for row in range(height, 0, -1):
        label = f"{high:6.2f}" if row == height else f"{low:6.2f}" if row == 1 else " " * 6
        bars = "".join(_EIGHTHS[min(8, max(0, eighths - 8 * (row - 1)))] for eighths in filled)
        lines.append(f"{label} ┤{bars}".rstrip())
    last = str(len(values)) if len(values) > 1 else ""
    ruler = f"1{last:>{len(columns) - 1}}"
    return "\n".join([*lines, f"{'':6} └{'─' * len(columns)}", f"{'':8}{ruler}"])


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values: the means of as many equal parts."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]


def pluralize(number: int, noun: str) -> str:
    """The number and the noun, which takes an s unless there is one of it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""Numbers and curves as text: charts, counts with their nouns, durations, and text that is safe to print."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the values as one row of at most ``width`` bars, scaled to their own range."""
    if not values:
        return ""
    columns = _resampled(values, width)
    low, high = min(columns), max(columns)
    if high == low:
        return _EIGHTHS[4] * len(columns)
    return "".join(_EIGHTHS[1 + round(7 * (value - low) / (high - low))] for value in columns)


def bar_chart(values: Sequence[float], *, width: int = 60, height: int = 8) -> str:
    """Return the values as a chart of filled columns: the range at the left, the steps, counted from 1, below.

    The scale runs from 0, or from the smallest value if that is negative, to the largest value.
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
    """Return at most ``width`` values, the means of equal parts."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]


def pluralize(number: int, noun: str) -> str:
    """Return the number and the noun, with an s unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_clock(seconds: float) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_duration(seconds: float) -> str:
    """Return a duration with its unit: ``4.2 s``, ``3:05 min``, ``1:02:03``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d} min"


def escape_control_characters(text: str) -> str:
    """Return the text with visible control characters, so that a model's or tool's text cannot control a terminal."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else _visible(character) for character in text
    )


def _visible(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

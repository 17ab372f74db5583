"""Thinking: the parts of a turn's text that the model thinks rather than says."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

MARKER = re.compile(r"</?think>|\[/?THINK\]")
"""What begins and ends thinking: ``<think>`` of most models, ``[THINK]`` of Mistral's."""

THINKING = re.compile(r"<think>|\[THINK\]")
"""What begins it."""

Span = tuple[int, int]


def thinking_spans(text: str, skip: Sequence[Span] = ()) -> list[Span]:
    """Where ``text`` is between ``<think>`` and ``</think>`` (or ``[THINK]`` and ``[/THINK]``), the markers included.

    Thinking that is never closed goes on to the end. A closing marker without an opening one closes thinking that the
    prompt had opened, so it starts at the beginning.

    Args:
        text: the text of one turn.
        skip: spans, in order, in which markers mean nothing, for instance the arguments of a call.
    """
    spans: list[Span] = []
    opened: int | None = None
    for marker in MARKER.finditer(text):
        if is_inside(marker.start(), skip):
            continue
        if THINKING.match(marker.group()):
            opened = marker.start() if opened is None else opened
        elif opened is not None or not spans:
            spans.append((opened or 0, marker.end()))
            opened = None
    if opened is not None:
        spans.append((opened, len(text)))
    return spans


def is_inside(position: int, spans: Sequence[Span]) -> bool:
    """Whether a position lies in one of ``spans``, which are in order and do not overlap."""
    if not spans:
        return False
    before = bisect.bisect_right(spans, position, key=lambda span: span[0])
    return before > 0 and position < spans[before - 1][1]

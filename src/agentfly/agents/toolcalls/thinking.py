"""Thinking: the parts of a turn's text that the model thinks rather than says."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

MARKER = re.compile(r"</?think>|\[/?THINK\]")
"""What begins and ends thinking: ``<think>`` of most models, ``[THINK]`` of Mistral's."""

THINKING = re.compile(r"<think>|\[THINK\]")
"""What begins it."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Thinking:
    """Where a turn is thinking.

    Attributes:
        spans: from each opening marker to its closing one, both included.
        stray: closing markers that close nothing.
        is_open: whether the last of the spans is never closed, and so goes on to the end.
    """

    spans: Sequence[Span] = ()
    stray: Sequence[Span] = ()
    is_open: bool = False


def read_thinking(text: str, skip: Sequence[Span] = ()) -> Thinking:
    """Where ``text`` is between ``<think>`` and ``</think>`` (or ``[THINK]`` and ``[/THINK]``).

    Args:
        text: the text of one turn, behind the opening marker where the prompt had opened thinking.
        skip: spans, in order, in which markers mean nothing, for instance the arguments of a call.
    """
    spans: list[Span] = []
    stray: list[Span] = []
    opened: int | None = None
    for marker in MARKER.finditer(text):
        if is_inside(marker.start(), skip):
            continue
        if THINKING.match(marker.group()):
            opened = marker.start() if opened is None else opened
        elif opened is not None:
            spans.append((opened, marker.end()))
            opened = None
        else:
            stray.append(marker.span())
    if opened is not None:
        spans.append((opened, len(text)))
    return Thinking(spans, stray, opened is not None)


def is_inside(position: int, spans: Sequence[Span]) -> bool:
    """Whether a position lies in one of ``spans``, which are in order and do not overlap."""
    if not spans:
        return False
    before = bisect.bisect_right(spans, position, key=lambda span: span[0])
    return before > 0 and position < spans[before - 1][1]

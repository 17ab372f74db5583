"""Reasoning in a turn's text: its markers, its spans, and its separation from the visible text."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

REASONING_MARKER = re.compile(r"</?think>|\[/?THINK\]")
"""What begins and ends thinking: ``<think>`` of most models, ``[THINK]`` of Mistral's."""

REASONING_OPENER = re.compile(r"<think>|\[THINK\]")
"""What begins it."""

CharSpan = tuple[int, int]


@dataclass(frozen=True)
class Thinking:
    """Where a turn is thinking.

    Attributes:
        spans: from each opening marker to its closing one, both included.
        stray: closing markers that close nothing.
        is_open: whether the last of the spans is never closed, and so goes on to the end.
    """

    spans: Sequence[CharSpan] = ()
    stray: Sequence[CharSpan] = ()
    is_open: bool = False


def read_thinking(text: str, skip: Sequence[CharSpan] = ()) -> Thinking:
    """Where ``text`` is between ``<think>`` and ``</think>`` (or ``[THINK]`` and ``[/THINK]``).

    Args:
        text: the text of one turn, behind the opening marker where the prompt had opened thinking.
        skip: spans, in order, in which markers mean nothing, for instance the arguments of a call.
    """
    spans: list[CharSpan] = []
    stray: list[CharSpan] = []
    opened: int | None = None
    for marker in REASONING_MARKER.finditer(text):
        if is_inside(marker.start(), skip):
            continue
        if REASONING_OPENER.match(marker.group()):
            opened = marker.start() if opened is None else opened
        elif opened is not None:
            spans.append((opened, marker.end()))
            opened = None
        else:
            stray.append(marker.span())
    if opened is not None:
        spans.append((opened, len(text)))
    return Thinking(spans, stray, opened is not None)


def is_inside(position: int, spans: Sequence[CharSpan]) -> bool:
    """Whether a position lies in one of ``spans``, which are in order and do not overlap."""
    if not spans:
        return False
    before = bisect.bisect_right(spans, position, key=lambda span: span[0])
    return before > 0 and position < spans[before - 1][1]


REASONING_MARKERS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What begins and ends thoughts in the templates of most models; the second pair is Mistral's."""


@dataclass(frozen=True)
class ReasoningMarkers:
    """How a model's turns hold thoughts.

    Attributes:
        opener: what begins them, without white space around it.
        closer: what ends them.
        opened: whether the header of a turn opens them, so that the turn itself only ends them.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    opened: bool = False

    def split(self, text: str, *, opened: bool | None = None) -> tuple[str | None, str]:
        """The thoughts of a turn, None where there are none, and what is said.

        Thoughts that are never closed go on to the end.

        Args:
            text: the turn.
            opened: whether thoughts may be open from the beginning on; None for what the header does.
        """
        begun = text.lstrip()
        explicit = begun.startswith(self.opener)
        thoughts, closed, said = begun.removeprefix(self.opener).partition(self.closer)
        if closed and (explicit or (self.opened and self.opener not in thoughts)):
            return thoughts.strip("\n"), said.lstrip("\n")
        if explicit or (self.opened if opened is None else opened):
            return thoughts.strip("\n"), ""
        return None, text

    def join(self, thoughts: str, said: str) -> str:
        """A turn's text out of its thoughts and what is said."""
        return f"{self.opener}\n{thoughts}\n{self.closer}\n\n{said}"

    def without_markers(self, text: str) -> str:
        """A text without the marks of thoughts and white space around it."""
        return text.replace(self.opener, "").replace(self.closer, "").strip()

    def without_opening_marker(self, header: str) -> str:
        """The header of a turn without the marks of thoughts at its end: those that open them, or leave them out."""
        bare = header
        while (text := bare.rstrip()).endswith((self.opener, self.closer)):
            bare = text.removesuffix(self.opener).removesuffix(self.closer)
        return bare

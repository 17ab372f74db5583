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
    """The parts of a turn that are reasoning.

    Attributes:
        spans: from each opening marker to its closing marker, both included.
        stray: closing markers without an opening one.
        is_open: whether the last span has no closing marker and extends to the end.
    """

    spans: Sequence[CharSpan] = ()
    stray: Sequence[CharSpan] = ()
    is_open: bool = False


def read_thinking(text: str, skip: Sequence[CharSpan] = ()) -> Thinking:
    """Find the text between ``<think>`` and ``</think>`` (or ``[THINK]`` and ``[/THINK]``).

    Args:
        text: the text of one turn, after the opening marker if the prompt opened the reasoning.
        skip: ordered spans in which markers mean nothing, for instance the arguments of a call.
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
    """The markers of reasoning in a model's turns.

    Attributes:
        opener: the opening marker, without surrounding white space.
        closer: the closing marker.
        opened: whether a turn's header opens the reasoning, so that the turn itself only closes it.
    """

    opener: str = "<think>"
    closer: str = "</think>"
    opened: bool = False

    def split(self, text: str, *, opened: bool | None = None) -> tuple[str | None, str]:
        """Return a turn's reasoning, None if there is none, and its visible text.

        Reasoning without a closing marker extends to the end.

        Args:
            text: the turn.
            opened: whether the reasoning may be open from the start; None for the behaviour of the header.
        """
        begun = text.lstrip()
        explicit = begun.startswith(self.opener)
        reasoning, closed, content = begun.removeprefix(self.opener).partition(self.closer)
        if closed and (explicit or (self.opened and self.opener not in reasoning)):
            return reasoning.strip("\n"), content.lstrip("\n")
        if explicit or (self.opened if opened is None else opened):
            return reasoning.strip("\n"), ""
        return None, text

    def join(self, reasoning: str, content: str) -> str:
        """Return a turn's text from its reasoning and its visible text."""
        return f"{self.opener}\n{reasoning}\n{self.closer}\n\n{content}"

    def without_markers(self, text: str) -> str:
        """Return a text without markers of reasoning and without white space around it."""
        return text.replace(self.opener, "").replace(self.closer, "").strip()

    def without_opening_marker(self, header: str) -> str:
        """Return a turn's header without a reasoning marker at its end, which opens the reasoning or skips it."""
        bare = header
        while (text := bare.rstrip()).endswith((self.opener, self.closer)):
            bare = text.removesuffix(self.opener).removesuffix(self.closer)
        return bare

"""Verdict: the JSON object that a judge ends with, read from whatever it said around it."""

from __future__ import annotations

import re
from typing import Any

from agentfly.errors import APIMalformed
from agentfly.json_reader import NotJSON, decode_value
from agentfly.resources.apis.completion import ChatCompletion

_STRAY_BRACES = 100  # that begin no object: a text with more is not read to its end, which would take too long
_MOST_CUTS = 4  # ends of thoughts behind which a verdict is looked for
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_LINE_BEFORE = re.compile(r"[ \t>*_`]*")
_LINE_BEHIND = re.compile(r"[ \t.*_`]*(?:\n|\Z)")
_END = re.compile(r"[\s.*_`]*\Z")


def conclusion(verdict: ChatCompletion, wanted: str) -> str:
    """What a judge said, where it said it all.

    Raises:
        APIMalformed: it was cut off, and half of a number is a number too.
    """
    if verdict.finish_reason == "length":
        raise APIMalformed(f"The judge was cut off before its {wanted}. Raise max_tokens.")
    return verdict.text


def behind_thoughts(text: str) -> str:
    """What follows the last thought of a judge."""
    return text[_cuts(text)[0] :].strip()


def object_with(key: str, text: str) -> dict[str, Any]:
    """The JSON object with a key that a judge concludes with; else an empty one.

    A judge thinks, and quotes what the response says. So the object must be the end of what it said, or stand on lines
    of its own; it must not stand in thoughts, closed or not, or inside another one; and it is never repaired. Of
    several, the last is the conclusion.
    """
    for cut in _cuts(text):
        found, start, end = _last_object(key, text, cut)
        if found and not _THOUGHT.search(text, cut, start) and not _THOUGHT.search(text, end):
            return found
    return {}


def _cuts(text: str) -> list[int]:
    """Where what is said may begin: behind the last end of a thought, or one before, if an object quotes the last."""
    ends = [thought.end() for thought in _THOUGHT.finditer(text) if thought.group(1) or thought.group(2)]
    return [*ends[: -_MOST_CUTS - 1 : -1], 0]


def _last_object(key: str, text: str, position: int) -> tuple[dict[str, Any], int, int]:
    """The last object from ``position`` on that is set apart, and where it begins and ends."""
    last: tuple[dict[str, Any], int, int] = ({}, position, position)
    start, stray = text.find("{", position), 0
    while start >= 0 and stray < _STRAY_BRACES:
        try:
            found, end = decode_value(text, start)
            if key in found and _is_apart(text, start, end):
                last = (found, start, end)
        except NotJSON:
            end, stray = start + 1, stray + 1
        start = text.find("{", end)
    return last if start < 0 else ({}, position, position)


def _is_apart(text: str, start: int, end: int) -> bool:
    before = _LINE_BEFORE.fullmatch(text, text.rfind("\n", 0, start) + 1, start)
    return _END.match(text, end) is not None or (before is not None and _LINE_BEHIND.match(text, end) is not None)

"""Verdict: the JSON object that a judge ends with, read from whatever it said around it."""

from __future__ import annotations

import json
import re
from typing import Any

import json_repair

from agentfly.errors import APIMalformed
from agentfly.resources.apis.completion import ChatCompletion

_DECODER = json.JSONDecoder()
_STRAY_BRACES = 100  # that begin no object: a text with more is not read to its end, which would take too long
_THOUGHT_ENDS = ("</think>", "</thinking>")
_REPAIRABLE = 2_000  # characters: repairing takes time that grows faster than what is repaired


def conclusion(verdict: ChatCompletion, wanted: str) -> str:
    """What a judge said after its thoughts.

    Raises:
        APIMalformed: it was cut off, and half of a number is a number too.
    """
    if verdict.finish_reason == "length":
        raise APIMalformed(f"The judge was cut off before its {wanted}. Raise max_tokens.")
    text = verdict.text
    return text[max([0, *(text.rfind(end) + len(end) for end in _THOUGHT_ENDS if end in text)]) :].strip()


def object_with(key: str, text: str) -> dict[str, Any]:
    """The last JSON object that has a key, not counting those inside of another; else an empty one.

    A judge may quote an object that the response gives itself. So an object within another one's text is none, and
    what is not JSON is repaired only where the key is written once.
    """
    return _last_object(key, text) or _repaired_object(key, text)


def _last_object(key: str, text: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    start, stray = text.find("{"), 0
    while start >= 0 and stray < _STRAY_BRACES:
        try:
            found, end = _DECODER.raw_decode(text, start)
            last = found if key in found else last
        except (ValueError, RecursionError):
            end, stray = start + 1, stray + 1
        start = text.find("{", end)
    return last if start < 0 else {}


def _repaired_object(key: str, text: str) -> dict[str, Any]:
    named = re.compile(rf"{key}\W{{0,4}}:", re.IGNORECASE)
    start = text.find("{")
    if start < 0 or len(text) - start > _REPAIRABLE or len(named.findall(text)) != 1:
        return {}
    try:
        found = json_repair.loads(text[start:])
    except (ValueError, RecursionError):
        return {}
    objects = found if isinstance(found, list) else [found]
    return next((one for one in objects if isinstance(one, dict) and key in one), {})

"""Call attempts: text that is plainly meant as a call, though not written as the agent's format wants it."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection

_NAMED = re.compile(
    r"""\b(?:name|tool|tool_name|function|function_name|action)["']?\s*:\s*["']([^"'\s]{1,64})["']""", re.IGNORECASE
)
_ARGUMENTS = re.compile(
    r"""\b(?:arguments|parameters|args|kwargs|params|input|tool_input|action_input)["']?\s*:""", re.IGNORECASE
)
_NOTHING_ELSE = re.compile(r"\s*+,?\s*+\}")
_OPENING = re.compile(
    r"<tool_call>|<function=|<function_call>|<\|python_(?:tag|start)\|>|<\|tool_call_start\|>|\[TOOL_CALLS\]"
    r"|<｜tool▁calls?▁begin｜>"
)
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_ACTION = re.compile(
    r"^[ \t>*_#-]*Action(?:[ \t]+\d+)?[ \t*_]*:[ \t*_`]*([A-Za-z_][\w-]*)", re.IGNORECASE | re.MULTILINE
)
_AROUND = 1000  # characters around a tool's name in which its arguments must be named
_BEHIND = 100  # characters behind a marker in which a tool must be named


def attempted_tool(text: str, known: Collection[str]) -> str | None:
    """The tool that ``text`` plainly means to call, in whatever format; None if it calls none.

    A call is meant where an object names a tool and its arguments, where a marker with which models begin calls stands
    before a tool's name, and where a line says ``Action:`` and a tool's name. Well-formed it need not be.

    Args:
        text: what was said in a turn, without thinking.
        known: names of the agent's tools.
    """
    arguments: list[int] | None = None  # where arguments are named
    for named in _NAMED.finditer(text):
        if named.group(1) in known and "{" in text[max(0, named.start() - _AROUND) : named.start()]:
            if _is_whole(text, named):
                return named.group(1)
            if arguments is None:
                arguments = [found.start() for found in _ARGUMENTS.finditer(text)]
            if _is_near(named, arguments):
                return named.group(1)
    for opening in _OPENING.finditer(text):
        for word in _WORD.finditer(text, opening.end(), opening.end() + _BEHIND):
            if word.group() in known:
                return word.group()
    return next((action.group(1) for action in _ACTION.finditer(text) if action.group(1) in known), None)


def _is_whole(text: str, named: re.Match[str]) -> bool:
    """Whether the name is all that its object holds."""
    before = text[max(0, named.start() - _AROUND) : named.start()].rstrip("\"' \t\r\n")
    return before.endswith("{") and _NOTHING_ELSE.match(text, named.end()) is not None


def _is_near(named: re.Match[str], places: list[int]) -> bool:
    """Whether one of ``places``, which are in order, lies around the name."""
    following = bisect.bisect_left(places, named.start() - _AROUND)
    return following < len(places) and places[following] < named.end() + _AROUND

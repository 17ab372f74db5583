"""Calls as JSON objects: what `decode_objects` gives, read as a call."""

from __future__ import annotations

import json
import re
from typing import Any

from agentfly.agents.toolcalls.block import Known, WrittenCall, unreadable
from agentfly.agents.toolcalls.json_text import decode_objects, skip_space
from agentfly.json_reader import NotJSON, decode_value

_NAME = re.compile(r"""["']?\bname\b["']?\s*:\s*["']([^"'\n]{1,64})["']""")
_BESIDE = ("id", "type")  # of a call, not of its arguments


def call_of(value: Any, example: str, known: Known) -> WrittenCall:
    """A call with ``name`` and ``arguments`` (or ``parameters``), which may be a JSON text of an object.

    An ``id`` and a ``type`` beside them are of the call, and are left out. Where the tool has an argument of that name
    they may be misplaced, so the call is an error; so is one with anything else beside them.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _wrong(value, "", 'it must be a JSON object with the text "name"', example)
    tool = known.get(name)
    taken = {argument.name for argument in tool.schema.arguments} if tool else set()
    allowed = {"name", "arguments", "parameters", *(beside for beside in _BESIDE if beside not in taken)}
    if not allowed.issuperset(value) or ("arguments" in value and "parameters" in value):
        return _wrong(value, name, 'everything that the tool takes must stand inside "arguments"', example)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    if not isinstance(arguments, dict):
        return _wrong(value, name, '"arguments" must be a JSON object', example)
    return WrittenCall(name, arguments)


def unreadable_call(written: str, example: str) -> WrittenCall:
    """The one error of text that should be nothing but the JSON objects of calls, and is not."""
    return unreadable(written, _fault(written), example, name_in(written))


def unreadable_arguments(name: str, written: str, example: str) -> WrittenCall:
    """The error of a call of a tool whose arguments should be the one JSON object of ``written``, and are not."""
    return unreadable(written, _fault(written, "its arguments must be one JSON object"), example, name)


def name_in(written: str) -> str:
    """The tool's name in text that is no JSON; empty if it is not to be seen."""
    named = _NAME.search(written)
    return named.group(1) if named else ""


def _fault(written: str, otherwise: str = "it must be a JSON object") -> str:
    try:
        objects, end = decode_objects(written, 0)
    except NotJSON as error:
        return str(error)
    if end < len(written):
        return f"there is more text behind the JSON object, at character {end}"
    return otherwise if len(objects) == 1 else "it must be one JSON object"


def _object_in(written: str) -> Any:
    """The object of which ``written`` is the JSON text; any other text as it is, to be refused as one."""
    try:
        value, end = decode_value(written, skip_space(written, 0))
    except NotJSON:
        return written
    return value if skip_space(written, end) == len(written) else written


def _wrong(value: Any, name: str, reason: str, example: str) -> WrittenCall:
    return unreadable(json.dumps(value, ensure_ascii=False), reason, example, name)

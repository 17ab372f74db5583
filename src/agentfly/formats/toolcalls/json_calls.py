"""Calls as JSON objects: decoding, validation and the errors of malformed calls."""

from __future__ import annotations

import json
import re
from typing import Any

from agentfly.core.errors import UsageError
from agentfly.core.lenient_json import InvalidJSON, decode_value
from agentfly.formats.toolcalls.block_format import ParsedCall, ToolsByName, malformed_call

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*,?\s*")
_THINK = re.compile(r"\[(/?THINK\])")


def decode_objects(text: str, start: int) -> tuple[list[Any], int]:
    """Decode consecutive JSON objects from ``start`` on, or one list of objects.

    Returns:
        The objects, and the position after the last one and the white space that follows it.

    Raises:
        InvalidJSON: there is no object, or it cannot be decoded.
    """
    position = skip_space(text, start)
    if not text.startswith(("{", "["), position):
        raise InvalidJSON("there is no JSON object")
    objects: list[Any] = []
    while True:
        value, position = decode_value(text, position, origin=start)
        objects.extend(value if isinstance(value, list) else [value])
        following = _BETWEEN.match(text, position)
        assert following is not None
        if not text.startswith("{", following.end()):
            break
        position = following.end()
    if not objects:
        raise InvalidJSON("there is no JSON object, only an empty list")
    return objects, skip_space(text, position)


def dump_escaped(value: Any) -> str:
    """Return ``value`` as JSON on one line. ``<`` is escaped, so no marker of a text format can occur in it.

    Raises:
        UsageError: the value cannot be written as JSON.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"A tool call cannot be written with an argument that JSON cannot hold: {error}.") from error
    return _THINK.sub(r"\\u005b\1", text.replace("<", "\\u003c"))


def skip_space(text: str, position: int) -> int:
    """Return the position after the white space at ``position``."""
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()


_NAME = re.compile(r"""["']?\bname\b["']?\s*:\s*["']([^"'\n]{1,64})["']""")
_CALL_FIELDS = ("id", "type")  # fields of a call, not arguments


def call_from_json(value: Any, example: str, known: ToolsByName) -> ParsedCall:
    """Return the call in an object with ``name`` and ``arguments`` (or ``parameters``, or a JSON text of them).

    Its members ``id`` and ``type`` belong to the call and are dropped. If the tool has an argument of that name, they
    may be misplaced arguments, so the call is an error. So is a call with any other member.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _wrong(value, "", 'it must be a JSON object with the text "name"', example)
    tool = known.get(name)
    taken = {argument.name for argument in tool.schema.arguments} if tool else set()
    allowed = {"name", "arguments", "parameters", *(field for field in _CALL_FIELDS if field not in taken)}
    if not allowed.issuperset(value) or ("arguments" in value and "parameters" in value):
        return _wrong(value, name, 'everything that the tool takes must stand inside "arguments"', example)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    if not isinstance(arguments, dict):
        return _wrong(value, name, '"arguments" must be a JSON object', example)
    return ParsedCall(name, arguments)


def malformed_json_call(written: str, example: str) -> ParsedCall:
    """Return the error for a text that should consist of the JSON objects of calls."""
    return malformed_call(written, _fault(written), example, find_tool_name(written))


def malformed_json_arguments(name: str, written: str, example: str) -> ParsedCall:
    """Return the error for a call whose arguments are not one JSON object."""
    return malformed_call(written, _fault(written, "its arguments must be one JSON object"), example, name)


def find_tool_name(written: str) -> str:
    """Return the tool's name in a text that is not valid JSON; empty if none is recognised."""
    named = _NAME.search(written)
    return named.group(1) if named else ""


def _fault(written: str, otherwise: str = "it must be a JSON object") -> str:
    try:
        objects, end = decode_objects(written, 0)
    except InvalidJSON as error:
        return str(error)
    if end < len(written):
        return f"there is more text behind the JSON object, at character {end}"
    return otherwise if len(objects) == 1 else "it must be one JSON object"


def _object_in(written: str) -> Any:
    """Decode ``written`` if it is the JSON text of an object; return any other text unchanged, to be rejected later."""
    try:
        value, end = decode_value(written, skip_space(written, 0))
    except InvalidJSON:
        return written
    return value if skip_space(written, end) == len(written) else written


def _wrong(value: Any, name: str, reason: str, example: str) -> ParsedCall:
    return malformed_call(json.dumps(value, ensure_ascii=False), reason, example, name)

"""Calls as JSON objects: what `decode_objects` gives, read as a call."""

from __future__ import annotations

import json
import re
from typing import Any

from agentfly.agents.toolcalls.block import WrittenCall, unreadable
from agentfly.agents.toolcalls.json_text import BadSyntax, NotJSON, decode_objects, repair

_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,64})"')
_MEMBERS = frozenset({"name", "arguments", "parameters", "id", "type"})


def calls_in_text(written: str, example: str, *, may_repair: bool) -> tuple[WrittenCall, ...]:
    """The calls of text that should be nothing but JSON objects and is not well formed: repaired, or one error.

    Args:
        written: the text.
        example: how it should be written, for the model.
        may_repair: whether it is certain that the call ends where ``written`` does.
    """
    try:
        objects = _objects(written, may_repair=may_repair)
    except NotJSON as error:
        return (unreadable(written, str(error), example, name_in(written)),)
    return tuple(call_of(value, example) for value in objects)


def arguments_in_text(name: str, written: str, example: str, *, may_repair: bool) -> WrittenCall:
    """The call whose arguments should be the one JSON object of ``written``; see `calls_in_text`."""
    try:
        objects = _objects(written, may_repair=may_repair)
    except NotJSON as error:
        return unreadable(written, str(error), example, name)
    if len(objects) != 1 or not isinstance(objects[0], dict):
        return unreadable(written, "its arguments must be one JSON object", example, name)
    return WrittenCall(name, objects[0])


def call_of(value: Any, example: str) -> WrittenCall:
    """A call with ``name`` and ``arguments`` (or ``parameters``), which may be a JSON text of an object."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _wrong(value, "", 'it must be a JSON object with the text "name"', example)
    if not _MEMBERS.issuperset(value) or ("arguments" in value and "parameters" in value):
        return _wrong(value, name, 'everything that the tool takes must stand inside "arguments"', example)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            decoded, end = decode_objects(arguments, 0)
            arguments = decoded[0] if len(decoded) == 1 and end == len(arguments) else arguments
        except NotJSON:
            pass  # it stays a text, and is refused as one
    if not isinstance(arguments, dict):
        return _wrong(value, name, '"arguments" must be a JSON object', example)
    return WrittenCall(name, arguments)


def name_in(written: str) -> str:
    """The tool's name in text that is no JSON; empty if it is not to be seen."""
    named = _NAME.search(written)
    return named.group(1) if named else ""


def _objects(written: str, *, may_repair: bool) -> list[Any]:
    try:
        objects, end = decode_objects(written, 0)
        if end == len(written):
            return objects
        wrong: NotJSON = BadSyntax(f"there is more text after the object, at character {end}")
    except BadSyntax as error:
        wrong = error
    if may_repair:
        try:
            return repair(written)
        except NotJSON:
            pass  # what is wrong with the text as it stands says more
    raise wrong


def _wrong(value: Any, name: str, reason: str, example: str) -> WrittenCall:
    return unreadable(json.dumps(value, ensure_ascii=False), reason, example, name)

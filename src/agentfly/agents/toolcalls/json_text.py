"""JSON as models write it: decoded exactly, or an error that says where it is none."""

from __future__ import annotations

import json
import re
from typing import Any

from agentfly.errors import UsageError
from agentfly.json_reader import NotJSON, decode_value

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*,?\s*")
_THINK = re.compile(r"\[(/?THINK\])")


def decode_objects(text: str, start: int) -> tuple[list[Any], int]:
    """Decode the JSON objects that stand one after another from ``start`` on, or the one list of them.

    Returns:
        The objects, and the position after the last one and the white space that follows it.

    Raises:
        NotJSON: there is no object, or it cannot be decoded.
    """
    position = skip_space(text, start)
    if not text.startswith(("{", "["), position):
        raise NotJSON("there is no JSON object")
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
        raise NotJSON("there is no JSON object, only an empty list")
    return objects, skip_space(text, position)


def dump(value: Any) -> str:
    """``value`` as JSON on one line, in which no marker of a text format can stand: ``<`` is escaped.

    Raises:
        UsageError: JSON cannot hold the value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"A tool call cannot be written with an argument that JSON cannot hold: {error}.") from error
    return _THINK.sub(r"\\u005b\1", text.replace("<", "\\u003c"))


def skip_space(text: str, position: int) -> int:
    """The position of what follows the white space at ``position``."""
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()

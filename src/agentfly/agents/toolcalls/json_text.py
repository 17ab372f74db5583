"""JSON as models write it: decoded exactly, or an error that says where it is none."""

from __future__ import annotations

import json
import re
from typing import Any

from agentfly.agents.toolcalls.json_reader import (
    DEEPEST,
    JSONReader,
    NotJSON,
    TooDeep,
    finite,
    refuse_constant,
    unique,
)
from agentfly.errors import UsageError

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


def decode_value(text: str, start: int, *, origin: int | None = None) -> tuple[Any, int]:
    """Decode the JSON value that begins at ``start``, exactly; returns it and the position after it.

    Read besides is what has one meaning (see `JSONReader`): Python's quotes and constants, a comma behind the last
    member, and line breaks inside texts. Nothing is repaired. What could not be stored or would lose something is
    refused: a repeated name, a number that is not finite, nesting beyond 100 levels, half of a surrogate pair.

    Args:
        text: the text.
        start: where the value begins.
        origin: where the text begins that the model wrote as one; positions in messages are counted from there.

    Raises:
        NotJSON: there is no such value at ``start``. The message says where and why.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        reader = JSONReader(text, start, start if origin is None else origin)
        value = reader.value()
        end = reader.position
    except RecursionError:
        raise TooDeep from None
    except NotJSON:
        raise
    except ValueError:  # int() of too many digits
        raise NotJSON("a number in it has too many digits") from None
    if not _is_surely_storable(text[start:end]):
        _require_storable(value)
    return value, end


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


def _is_surely_storable(written: str) -> bool:
    """Whether JSON text tells by itself that nothing in it is nested too deeply or half of a surrogate pair."""
    return written.isascii() and "\\u" not in written and written.count("{") + written.count("[") <= DEEPEST


def _require_storable(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _require_whole(one)
            elif isinstance(one, dict):
                inner.extend(one)
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        if not inner:
            return
        level = inner
    raise TooDeep


def _require_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotJSON("a text in it holds half of a surrogate pair") from None


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=unique, parse_float=finite, parse_constant=refuse_constant)

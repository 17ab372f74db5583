"""JSON as models write it: decoded exactly, or repaired where that is certain to lose nothing."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import json_repair

from agentfly.agents.toolcalls.python_call import NotPython, read_value
from agentfly.errors import UsageError

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*,?\s*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_REPAIRABLE = str.maketrans("", "", "}],\"' \t\r\n")
_THINK = re.compile(r"\[(/?THINK\])")
_MOST_REPAIRED = 20_000  # characters: longer text is an error, since guessing at it takes too long
_DEEPEST = 100  # levels of nesting: nothing downstream can then run out of stack


class NotJSON(ValueError):
    """The text is not what was expected. The message says where and why."""


class BadSyntax(NotJSON):
    """The text is not JSON; it may be repairable. Any other `NotJSON` is a value that must not be had."""


class TooDeep(NotJSON):
    """The value is nested beyond what may be had. What it holds is not worth looking at again from within."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def decode_objects(text: str, start: int) -> tuple[list[Any], int]:
    """Decode the JSON objects that stand one after another from ``start`` on, or the one list of them.

    Returns:
        The objects, and the position after the last one and the white space that follows it.

    Raises:
        NotJSON: there is no object, or it cannot be decoded.
    """
    position = _skip(text, start)
    if not text.startswith(("{", "["), position):
        raise NotJSON("there is no JSON object")
    objects: list[Any] = []
    while True:
        value, position = decode_value(text, position)
        objects.extend(value if isinstance(value, list) else [value])
        following = _BETWEEN.match(text, position)
        assert following is not None
        if not text.startswith("{", following.end()):
            break
        position = following.end()
    if not objects:
        raise NotJSON("there is no JSON object, only an empty list")
    return objects, _skip(text, position)


def decode_value(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value that begins at ``start``; returns it and the position after it.

    Line breaks inside strings are taken as they stand. What could not be stored or would lose something is refused: a
    repeated name, a number that is not finite, nesting beyond 100 levels, half of a surrogate pair.

    Raises:
        NotJSON: there is no JSON value at ``start``.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        if not _is_surely_storable(text[start:end]):
            _require_storable(value)
    except json.JSONDecodeError as error:
        raise BadSyntax(f"it is not valid JSON ({error.msg} at character {error.pos - start})") from None
    except RecursionError:
        raise TooDeep from None
    except TooDeep:
        raise
    except ValueError as error:  # a repeated name, NaN, a number of too many digits, half of a surrogate pair
        raise NotJSON(str(error)) from None
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


def repair(text: str) -> list[Any]:
    """The objects of ``text``, small slips repaired: see `HermesFormat` for which.

    Raises:
        NotJSON: the text has other faults than small slips, or a repair would lose part of it.
    """
    text = text.strip()
    if len(text) > _MOST_REPAIRED:
        raise NotJSON("it is too long to repair")
    value = _python_literal(text)
    if value is None:
        if not text.startswith(("{", "[")) or not text.endswith(("}", "]")) or _ends_in_string(text):
            raise NotJSON("it is cut off")
        value = _repaired(text)
    try:
        objects, _ = decode_objects(json.dumps(value), 0)  # by the decoder's own rules: no NaN, for instance
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJSON(str(error)) from None
    return objects


def _repaired(text: str) -> Any:
    try:
        value = json_repair.loads(text, skip_json_loads=True)
        kept = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise NotJSON(str(error)) from None
    if _substance(kept) != _substance(text) or kept.count('\\"') > text.count('\\"'):
        raise NotJSON("a repair would change what was written")
    return value


def _python_literal(text: str) -> Any:
    try:
        value = read_value(text)
    except NotPython:
        return None
    if not isinstance(value, (dict, list)) or _substance(repr(value)) != _substance(text):
        return None
    return value


def _substance(text: str) -> str:
    """What must not change in a repair: everything but quotes, closing brackets, commas and white space."""
    plain = _ESCAPE.sub(lambda escape: "" if escape[1] in "bfnrt" else escape[1], text)
    return plain.translate(_REPAIRABLE)


def _ends_in_string(text: str) -> bool:
    inside = escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = inside
        elif character == '"':
            inside = not inside
    return inside


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()


def _is_surely_storable(written: str) -> bool:
    """Whether JSON text tells by itself that nothing in it is nested too deeply or half of a surrogate pair."""
    return written.isascii() and "\\u" not in written and written.count("{") + written.count("[") <= _DEEPEST


def _require_storable(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                one.encode()  # raises a ValueError for half of a surrogate pair
            elif isinstance(one, dict):
                inner.extend(one)
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        if not inner:
            return
        level = inner
    raise TooDeep


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, one in pairs:
        if name in value:
            raise ValueError(f"the name {name[:100]!r} stands in it twice")
        value[name] = one
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:100]} is not a finite number")
    return value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


_DECODER = json.JSONDecoder(
    strict=False, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)

"""Parser for JSON with the variations that models write: single quotes, Python's constants, trailing commas.

Each variation has exactly one meaning, so nothing is guessed or lost. Anything else is an error with its position.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

_MAX_DEPTH = 100  # levels of nesting; no later code can then exceed the recursion limit

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"[\w.+-]+")
_BODIES = {  # a string up to its closing quote
    '"': re.compile(r'([^"\\]*+(?:\\.[^"\\]*+)*)"', re.DOTALL),
    "'": re.compile(r"([^'\\]*+(?:\\.[^'\\]*+)*)'", re.DOTALL),
}
_ESCAPES = {  # escapes with different meanings in JSON and Python
    '"': re.compile(r'\\(?!["\\bfnrt]|u[0-9a-fA-F]{4})', re.DOTALL),
    "'": re.compile(r"\\(?![\"'\\bfnrt]|u[0-9a-fA-F]{4})", re.DOTALL),
}
_PAIR = re.compile(r"\\(.)", re.DOTALL)
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NEAR = 30  # characters of the text that an error shows


class InvalidJSON(ValueError):
    """The text is not valid. The message says where and why."""


class RepeatedName(InvalidJSON):
    """An object has the same name twice."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name[:100]!r} stands in it twice")
        self.name = name


class NestingTooDeep(InvalidJSON):
    """The value is nested beyond the limit. Parsing again from a position inside it would be useless."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def decode_value(text: str, start: int, *, origin: int | None = None) -> tuple[Any, int]:
    """Decode the JSON value that begins at ``start``. Return it and the position after it.

    Unambiguous variations are accepted (see `LenientJSONReader`): Python's quotes and constants, a comma after the last
    member, and line breaks inside strings. Nothing is repaired. Values that cannot be stored are rejected: a repeated
    name, a number that is not finite, nesting beyond 100 levels, a lone surrogate.

    Args:
        text: the text.
        start: position at which the value begins.
        origin: position from which error messages count; by default ``start``.

    Raises:
        InvalidJSON: there is no such value at ``start``. The message says where and why.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        reader = LenientJSONReader(text, start, start if origin is None else origin)
        value = reader.value()
        end = reader.position
    except RecursionError:
        raise NestingTooDeep from None
    except InvalidJSON:
        raise
    except ValueError:  # int() of too many digits
        raise InvalidJSON("a number in it has too many digits") from None
    if not _is_surely_storable(text[start:end]):
        require_storable(value)
    return value, end


class LenientJSONReader:
    """Reads one value from a text.

    It accepts JSON and these variations: strings in single quotes, Python's ``True``, ``False`` and ``None``, a comma
    after the last member, and line breaks inside strings. Escapes must mean the same in Python and JSON. Adjacent
    strings are an error: they come from unescaped quotes, which joining would lose.

    Args:
        text: the text.
        start: position at which the value begins.
        origin: position from which error messages count.
    """

    def __init__(self, text: str, start: int, origin: int) -> None:
        self.position = start
        self._text = text
        self._origin = origin
        self._depth = 0
        self._after_text = False

    def value(self) -> Any:
        """Read the value, and move `position` to the end of it.

        Raises:
            InvalidJSON: there is no value, or one that is rejected.
        """
        first = self._next()
        if first in ("{", "["):
            return self._nested(first)
        if first in _BODIES:
            return self._string(first)
        self._after_text = False
        if number := _NUMBER.match(self._text, self.position):
            self.position = number.end()
            return _number(number.group(), whole=not (number.group(1) or number.group(2)))
        word = _WORD.match(self._text, self.position)
        if word is None:
            self._fail("a value is missing")
        if word.group() in ("NaN", "Infinity", "-Infinity"):
            raise InvalidJSON(f"{word.group()} is not a JSON value")
        if word.group() not in _CONSTANTS:
            self._fail("there is no such value, and a text must stand in quotes")
        self.position = word.end()
        return _CONSTANTS[word.group()]

    def _nested(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NestingTooDeep
        self.position += 1
        self._after_text = False
        value = self._object() if opening == "{" else self._array()
        self._depth -= 1
        self._after_text = False
        return value

    def _object(self) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        while self._goes_on("}", begun=bool(pairs)):
            quote = self._next()
            if quote not in _BODIES:
                self._fail("a name in quotes is missing")
            name = self._string(quote)
            if self._next() != ":":
                self._fail("':' is missing behind a name")
            self.position += 1
            pairs.append((name, self.value()))
        return without_repeats(pairs)

    def _array(self) -> list[Any]:
        values: list[Any] = []
        while self._goes_on("]", begun=bool(values)):
            values.append(self.value())
        return values

    def _goes_on(self, closing: str, *, begun: bool) -> bool:
        """Whether another member follows. A comma before the closing bracket is allowed."""
        following = self._next()
        if begun and following == ",":
            self.position += 1
            following = self._next()
        elif begun and following != closing:
            self._fail(f"',' or '{closing}' is missing")
        if following != closing:
            return True
        self.position += 1
        return False

    def _string(self, quote: str) -> str:
        opened = self.position
        body = _BODIES[quote].match(self._text, opened + 1)
        if body is None:
            self._fail("a text is not closed")
        written = body.group(1)
        if odd := _odd_escape(written, quote):
            self.position = opened + 1 + odd.start()
            self._fail("a backslash in a text must be written as two")
        if quote == "'":
            written = _PAIR.sub(lambda escape: "'" if escape[1] == "'" else escape[0], written)
            written = _QUOTE.sub(lambda found: '\\"' if found[0] == '"' else found[0], written)
        self.position = body.end()
        self._after_text = True
        return str(json.loads(f'"{written}"', strict=False))

    def _next(self) -> str:
        """Skip white space and return the next character; empty at the end."""
        space = _SPACE.match(self._text, self.position)
        self.position = space.end() if space else self.position
        return self._text[self.position : self.position + 1]

    def _fail(self, reason: str) -> NoReturn:
        near = self._text[self.position : self.position + _NEAR]
        where = f"at character {self.position - self._origin}, where {near!r} stands" if near else "at its end"
        quoted = near and (self._after_text or near[0] in _BODIES)
        cure = '; a quote inside a text is written as \\"' if quoted else ""
        raise InvalidJSON(f"it is not valid JSON: {reason} {where}{cure}")


def _number(written: str, *, whole: bool) -> int | float:
    if not whole:
        return _finite(written)
    try:
        return int(written)
    except ValueError:
        raise InvalidJSON("a number in it has too many digits") from None


def _finite(written: str) -> float:
    """Parse a number with a fraction or an exponent.

    Raises:
        InvalidJSON: it exceeds the range of a float.
    """
    value = float(written)
    if not math.isfinite(value):
        raise InvalidJSON(f"{written[:100]} is not a finite number")
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its members. An ``object_pairs_hook`` for `json.loads`.

    Raises:
        RepeatedName: it has a name twice, so that one value would be lost.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        raise RepeatedName(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return value


def _refuse_constant(constant: str) -> NoReturn:
    """Reject a constant that JSON does not have.

    Raises:
        InvalidJSON: always.
    """
    raise InvalidJSON(f"{constant} is not a JSON value")


def _odd_escape(written: str, quote: str) -> re.Match[str] | None:
    if "\\" not in written:
        return None
    return _ESCAPES[quote].search(_PAIR.sub(lambda pair: "  " if pair[1] == "\\" else pair[0], written))


def _is_surely_storable(written: str) -> bool:
    """Whether the text alone shows that its value has no excessive nesting and no lone surrogate."""
    return written.isascii() and "\\u" not in written and written.count("{") + written.count("[") <= _MAX_DEPTH


def require_storable(value: Any) -> None:
    """Raise unless a JSON value can be stored.

    Raises:
        InvalidJSON: it is nested beyond 100 levels, or has a lone surrogate.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
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
    raise NestingTooDeep


def _require_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidJSON("a text in it holds half of a surrogate pair") from None


_DECODER = json.JSONDecoder(
    strict=False, object_pairs_hook=without_repeats, parse_float=_finite, parse_constant=_refuse_constant
)

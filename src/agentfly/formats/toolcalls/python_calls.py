"""Python call expressions as models write them, ``[f(a=1), g("x", b=None)]``: parsed without running anything."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEYWORD = re.compile(r"([^\W\d][\w.-]*)\s*=(?!=)")
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9_]+")
_QUOTES = re.compile(r"\"\"\"|\'\'\'|\"|\'")
# No possessive quantifier around a group: early releases of Python 3.11 match those wrongly.
_UP_TO = {  # the text up to its closing quotes
    "'": re.compile(r"([^'\\]*+(?:\\.[^'\\]*+)*)'", re.DOTALL),
    '"': re.compile(r'([^"\\]*+(?:\\.[^"\\]*+)*)"', re.DOTALL),
    "'''": re.compile(r"([^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*)\'\'\'", re.DOTALL),
    '"""': re.compile(r'([^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*)"""', re.DOTALL),
}
_ESCAPE = re.compile(r"\\(\r?\n|N\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_DEEPEST = 100  # levels of nesting
_LONGEST_NUMBER = 1000  # characters


class InvalidPythonCall(ValueError):
    """The text is not a list of calls. The message says why."""


@dataclass(frozen=True)
class PythonCall:
    """One call: its positional arguments, and those with names."""

    name: str
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


def read_calls(text: str, start: int) -> tuple[list[PythonCall], int]:
    """Return the calls of the list that begins at ``start``, and the position after its closing bracket.

    Values are texts in Python's quotes, numbers, ``True``, ``False``, ``None`` (and JSON's names of them), lists, and
    dictionaries with texts as keys. A line break inside any quotes is kept. Adjacent texts are an error, as are names,
    operators and everything else that would have to be evaluated.

    Raises:
        InvalidPythonCall: there is no such list, or it contains anything else.
    """
    reader = _PythonCallReader(text, start)
    reader.expect("[")
    calls = reader.items("]", reader.call)
    if not calls:
        raise InvalidPythonCall("there is no call in the list")
    return calls, reader.position


def write_value(value: Any) -> str:
    """Return a value in Python syntax, on one line, with texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_value(key)}: {write_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(write_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


class _PythonCallReader:
    """Reads values from a text, from ``position`` on."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self._start = position
        self._depth = 0

    def expect(self, character: str) -> None:
        if not self._skip(character):
            raise self._wrong(f"'{character}' is missing")

    def items(self, closing: str, read: Callable[[], _T]) -> list[_T]:
        """Read the comma-separated items after an opening bracket."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise InvalidPythonCall("it is nested too deeply")
        found: list[_T] = []
        while not self._skip(closing):
            if found:
                self.expect(",")
                if self._skip(closing):
                    break
            found.append(read())
        self._depth -= 1
        return found

    def call(self) -> PythonCall:
        name = self._match(_NAME)
        if name is None:
            raise self._wrong("the name of a tool is missing")
        self.expect("(")
        call = PythonCall(name.group())
        for key, value in self.items(")", self._argument):
            if key is None and call.named:
                raise InvalidPythonCall("an argument without a name stands behind one with a name")
            if key is None:
                call.positional.append(value)
            elif key in call.named:
                raise InvalidPythonCall(f"the argument {key[:100]!r} is given twice")
            else:
                call.named[key] = value
        return call

    def value(self) -> Any:
        if self._skip("["):
            return self.items("]", self.value)
        if self._skip("{"):
            return _unique(self.items("}", self._pair))
        if quotes := self._match(_QUOTES):
            return self._only_text(quotes.group())
        if number := self._match(_NUMBER):
            return _number(number.group())
        name = self._match(_NAME)
        if name is None:
            raise self._wrong("a value is missing")
        if name.group() not in _CONSTANTS:
            self.position = name.start()
            raise self._wrong(f"{name.group()[:100]!r} is no value; texts must stand in quotes")
        return _CONSTANTS[name.group()]

    def _argument(self) -> tuple[str | None, Any]:
        keyword = self._match(_KEYWORD)
        return keyword.group(1) if keyword else None, self.value()

    def _pair(self) -> tuple[Any, Any]:
        key = self.value()
        self.expect(":")
        return key, self.value()

    def _only_text(self, quotes: str) -> str:
        """Return a text that has no other text next to it. Python would join the two, which loses unescaped quotes."""
        text = self._text(quotes)
        self._match(_SPACE)
        if _QUOTES.match(self.text, self.position):
            raise self._wrong('a text stands directly behind another; a quote inside a text is written as \\"')
        return text

    def _text(self, quotes: str) -> str:
        whole = _UP_TO[quotes].match(self.text, self.position)
        if whole is None:
            raise self._wrong(f"a text is not closed by {quotes}")
        self.position = whole.end()
        return _unescaped(whole.group(1))

    def _skip(self, character: str) -> bool:
        self._match(_SPACE)
        if not self.text.startswith(character, self.position):
            return False
        self.position += len(character)
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        space = _SPACE.match(self.text, self.position)
        found = pattern.match(self.text, space.end() if space else self.position)
        if found:
            self.position = found.end()
        return found

    def _wrong(self, reason: str) -> InvalidPythonCall:
        near = self.text[self.position : self.position + 30]
        if not near.strip():
            return InvalidPythonCall(f"{reason} at its end")
        return InvalidPythonCall(f"{reason}, at character {self.position - self._start}, where {near!r} stands")


def _unescaped(text: str) -> str:
    plain = _ESCAPE.sub(_escaped, text)
    try:
        plain.encode()
    except UnicodeEncodeError:
        raise InvalidPythonCall("a text holds half of a surrogate pair") from None
    return plain


def _escaped(escape: re.Match[str]) -> str:
    """Return the character of an escape. An unknown escape stays unchanged, as in Python."""
    written = escape.group(1)
    if written in _SIMPLE:
        return _SIMPLE[written]
    if written.endswith("\n"):
        return ""
    try:
        if written.startswith("N{"):
            return unicodedata.lookup(written[2:-1])
        if len(written) > 1:
            return chr(int(written[1:], 16) if written[0] in "xuU" else int(written, 8))
    except (KeyError, ValueError, OverflowError):
        raise InvalidPythonCall(f"there is no character \\{written[:50]}") from None
    if written in "xuUN":
        raise InvalidPythonCall(f"\\{written} is no whole escape; a backslash is written as two")
    return chr(int(written, 8)) if written in "01234567" else escape.group()


def _number(written: str) -> int | float:
    if len(written) > _LONGEST_NUMBER:
        raise InvalidPythonCall("a number has too many digits")
    try:
        if _WHOLE_NUMBER.fullmatch(written):
            if written.lstrip("+-")[0] == "0" and written.strip("+-0_"):
                raise InvalidPythonCall(f"{written} is no number in Python; a text must stand in quotes")
            return int(written)
        value = float(written)
    except ValueError:
        raise InvalidPythonCall(f"{written} is no number") from None
    if not math.isfinite(value):
        raise InvalidPythonCall(f"{written} is not a finite number")
    return value


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, one in pairs:
        if not isinstance(key, str):
            raise InvalidPythonCall("the keys of a dictionary must be texts in quotes")
        if key in value:
            raise InvalidPythonCall(f"the key {key[:100]!r} stands in it twice")
        value[key] = one
    return value

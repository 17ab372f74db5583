"""Conversion of users' values to JSON, of records to lines of JSON, and of values to short text for people."""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from array import array
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

MAX_DEPTH = 100
"""Maximum nesting depth of a recorded value. JSON readers support a few hundred levels."""

MAX_INT_BITS = 4096
"""The longest whole number that is recorded as one; Python reads and writes no more than 4,300 digits."""

MAX_SCORE = 1e30
"""The largest score: its square, and sums over any batch, are numbers still, in training's 32 bits too."""

MAX_REPR_CHARS = 1000
"""Maximum length of the text that replaces an object without a JSON form."""

JSONFallback = Callable[[Any], Any]
"""Returns the replacement of a value without a JSON form."""


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def canonical_json(value: Any) -> str:
    """Return a JSON value as a text that is the same for equal values, to compare or hash them.

    The order of keys does not count. Numbers count by value (``1`` equals ``1.0``, as some languages write it), and
    tuples count as lists.
    """
    return _CANONICAL.encode(_canonical(value))


def _canonical(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _canonical(part) for key, part in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_json_value(value: Any, unknown: JSONFallback | None = None) -> Any:
    """Return a value as JSON holds it: null, true, false, numbers, texts, lists and objects.

    Scalars and arrays of NumPy and tensors become numbers and lists, at any depth. Numbers that are not finite become
    null. Dataclasses and pydantic models become objects, and enumerations become their values. Tuples and sets become
    lists, sets in a fixed order. Bytes become text and dates ISO 8601. Objects whose class defines ``__str__`` become
    that text.

    Args:
        value: any value.
        unknown: called with a value that has no JSON form; its result replaces the value.

    Raises:
        TypeError: a value has no JSON form, and ``unknown`` is not given.
        RecursionError: the value is nested too deeply, or contains itself.
    """
    if value is None or value is True or value is False or type(value) is str or type(value) is int:
        return value
    if isinstance(value, Enum):
        return to_json_value(value.value, unknown)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key, unknown): to_json_value(item, unknown) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item, unknown) for item in value]
    if isinstance(value, Set):
        return sorted(
            (to_json_value(item, unknown) for item in value), key=lambda item: json.dumps(item, sort_keys=True)
        )
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)) and not isinstance(value, type):
        return _of_array(value, unknown)
    return _of_object(value, unknown)


def own_copy(value: Any) -> Any:
    """Copy the lists, mappings and sets in a value, at any depth. Everything else in it is shared."""
    if type(value) in (list, tuple):
        return type(value)(map(own_copy, value))
    if type(value) is dict:
        return {key: own_copy(item) for key, item in value.items()}
    return set(value) if type(value) is set else value


def to_json_line(value: Any) -> str:
    """Return a record as one line of JSON, without its line end. It never fails.

    Values without a JSON form become text, as do whole numbers with too many digits. Values that are nested too deeply
    or contain themselves are cut, with a remark.
    """
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
        line.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_JSONSanitizer()(value), allow_nan=False)
    return line


def as_finite_float(value: object) -> float | None:
    """A finite number as a float: Python's, a scalar of NumPy, or an array or tensor without dimensions.

    None for anything else.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # a whole number or a fraction beyond all floats
        return None
    return number if math.isfinite(number) else None


def score_of(value: object) -> float | None:
    """A number that can be a score, or a metric beside one: finite and at most `MAX_SCORE` to either side.

    None for anything else.
    """
    number = as_finite_float(value)
    return number if number is not None and abs(number) <= MAX_SCORE else None


def has_own_str(value: object) -> bool:
    """Return whether an object's class defines its text."""
    return any("__str__" in vars(kind) for kind in type(value).__mro__[:-1])


def repr_fallback(value: object) -> str:
    """Return the text that stands in a record for an object without a JSON form: its repr."""
    try:
        return repr(value)[:MAX_REPR_CHARS]
    except Exception:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _key(key: Any, unknown: JSONFallback | None = None) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    plain = to_json_value(key, unknown)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _of_array(value: Any, unknown: JSONFallback | None) -> Any:
    if getattr(value.dtype, "kind", "") in ("m", "M"):  # dates, which would become whole numbers
        value = value.astype(str)
    listed = value.tolist()
    if type(listed) is not type(value):
        return to_json_value(listed, unknown)
    return (
        as_finite_float(float(listed)) if isinstance(listed, numbers.Real) else str(listed)
    )  # wider than Python's own


def _of_object(value: Any, unknown: JSONFallback | None) -> Any:
    is_class = isinstance(value, type)
    if is_dataclass(value) and not is_class:
        return {field.name: to_json_value(getattr(value, field.name), unknown) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) and not is_class:
        return to_json_value(dump(), unknown)
    if callable(iso := getattr(value, "isoformat", None)) and not is_class:
        return str(iso())
    if isinstance(value, complex) or has_own_str(value):
        return str(value)
    if unknown is None:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} has no form in JSON")
    return to_json_value(unknown(value), unknown)


class _JSONSanitizer:
    """Turns any values into values that can be written and read again."""

    def __init__(self) -> None:
        self._path: set[int] = set()  # the containers that hold the value at hand

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, (Mapping, list, tuple)):
            if id(value) in self._path or len(self._path) >= MAX_DEPTH:
                return "(holds itself)" if id(value) in self._path else "(too deep to be recorded)"
            self._path.add(id(value))
            try:
                if isinstance(value, Mapping):
                    return {self._plain(key, _key): self(item) for key, item in value.items()}
                return [self(item) for item in value]
            finally:
                self._path.discard(id(value))
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            return hex(value)
        return self._plain(value, to_json_value)

    def _plain(self, value: Any, read: Callable[[Any, JSONFallback], Any]) -> Any:
        try:
            found = read(value, repr_fallback)
            json.dumps(found, allow_nan=False)
        except Exception:
            return repr_fallback(value)
        return found


class Brief:
    """A dataclass that is shown in a line or two, however much it holds: long texts and lists are shortened."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The fields that are not as by default, shortened."""
        named = ((field, getattr(self, field.name)) for field in fields(cast(Any, self)) if field.repr)
        shown = ", ".join(f"{field.name}={brief(value)}" for field, value in named if value is not field.default)
        return f"{type(self).__name__}({shown})"


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = _BRIEF.maxarray = 3
_BRIEF.maxlevel = 3


def brief(value: Any) -> str:
    """Return the shortened repr of a value. For a long list or mapping it includes the length."""
    shown = _BRIEF.repr(value)
    count = len(value) if isinstance(value, (list, tuple, dict, array)) else 0
    return f"{shown} ({count})" if count > _BRIEF.maxlist else shown

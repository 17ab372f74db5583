"""The types of values that may leave a simulator's process.

A pickle can call any function of the process that reads it. The wire format instead holds values of a few built-in
types and of types that the reader has declared (`DeclaredTypes`). Everything else is malformed. Decoding runs no code
outside this package. It takes memory and time in proportion to the length, and length, item count and depth are
bounded.

A value is one byte for its type, followed by its content. Numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from inspect import getattr_static
from pathlib import Path
from types import MemberDescriptorType
from typing import Any, Final

from agentfly.core.messages import Image

MAX_BYTES: Final = 256 << 20
MAX_ITEMS: Final = 1_000_000
MAX_DEPTH: Final = 100
MAX_OTHER_KEYS: Final = 20_000
"""Elements of a set, or keys of a mapping, that are neither texts nor bytes: their hashes can be made to collide."""

MAX_DIGITS: Final = 10_000
"""Digits of a decimal or a fraction, and its largest exponent: others are slow to compute with."""

COUNT = struct.Struct("<I")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
TIMEDELTA = struct.Struct("<iii")
DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
"""Types of NumPy's arrays that are data: numbers, texts and times."""

_FOLD_MARK = "'"  # marks the second of two equal clock times when the clock is set back


def _moment_to_text(moment: datetime | time) -> str:
    return moment.isoformat() + (_FOLD_MARK if moment.fold else "")


def _moment_from_text(kind: type[datetime] | type[time], text: str) -> datetime | time:
    return kind.fromisoformat(text.removesuffix(_FOLD_MARK)).replace(fold=int(text.endswith(_FOLD_MARK)))


TEXT_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime, _moment_to_text, partial(_moment_from_text, datetime)),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, _moment_to_text, partial(_moment_from_text, time)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "Path": (Path, str, Path),
}
"""Types with values that are encoded as text, by name: the type, its encoder and its decoder."""
NUMBER_TYPES = ("Decimal", "Fraction")


class NotSerializable(TypeError):
    """A value that is not data.

    Attributes:
        value: the value, or the offending part of it.
        why: the reason.
    """

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(why)
        self.value = value
        self.why = why


class MalformedData(ValueError):
    """Bytes that are not the encoding of any value."""


def is_huge(text: str) -> bool:
    """Return whether a number, given as text, is too large to compute with."""
    _, _, exponent = text.upper().partition("E")
    return len(text) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_DIGITS


FieldValues = tuple[Any, ...]

KNOWN: tuple[type, ...] = (Image,)
"""Types that are always declared."""


class DeclaredTypes:
    """Splits values of declared types into fields, and rebuilds them without calling any of their code.

    Args:
        types: dataclasses, attrs classes, pydantic models, named tuples, enums and exceptions. Other types have no
            known parts.

    Raises:
        TypeError: a type is of another kind, or one of its fields is a descriptor with code that runs when it is set.
    """

    def __init__(self, types: Iterable[type] = ()) -> None:
        given = (*KNOWN, *types)
        for one in given:
            if not (isinstance(one, type) and issubclass(one, Exception)):
                _require_plain_fields(one)
        self._types = {qualified_name(one): one for one in given}

    def name_of(self, kind: type) -> str | None:
        """Return the name of a type if it is declared, else None.

        Types are compared by name, because a class of a notebook is a different object in another process.
        """
        name = qualified_name(kind)
        return name if name in self._types and not issubclass(kind, BaseException) else None

    def fields_of(self, value: Any) -> FieldValues:
        """Return the fields of a value of a declared type."""
        if isinstance(value, Enum):
            return (value.name,) if value.name in type(value).__members__ else (None, value.value)
        if isinstance(value, tuple):
            return tuple(value)
        return tuple(getattr(value, name) for name in _fields_of(type(value)))

    def build(self, name: str, parts: FieldValues) -> Any:
        """Rebuild a value of a declared type from its fields.

        Raises:
            ValueError: the fields do not fit, or the type is not declared.
        """
        kind = self._types.get(name)
        if kind is None or issubclass(kind, BaseException):
            raise ValueError(f"the type {name[:100]!r} is not declared")
        if issubclass(kind, Enum):
            return _member(kind, *parts)
        names = _fields_of(kind)
        if len(parts) != len(names):
            raise ValueError(f"a {name} has {len(names)} parts, and not {len(parts)}")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, parts)
        if _is_model(kind):
            return _model(kind, dict(zip(names, parts, strict=True)))
        made = object.__new__(kind)
        for field, part in zip(names, parts, strict=True):
            object.__setattr__(made, field, part)
        return made

    def exception_type(self, name: str) -> type[Exception] | None:
        """Return the declared exception type of that name; None if there is none."""
        kind = self._types.get(name)
        return kind if kind is not None and issubclass(kind, Exception) else None


def qualified_name(kind: type) -> str:
    """Return a type's module and name."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _member(kind: type[Enum], name: Any = None, value: Any = None) -> Enum:
    """Return a member by its name, or a combination of flags by its value, as `enum` itself creates it.

    Raises:
        ValueError, KeyError, TypeError: it does not exist.
    """
    if name is not None:
        return kind.__members__[name]
    if not issubclass(kind, Flag) or type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.100} is not a combination of flags")
    made: Any = kind._value2member_map_.get(value)
    if made is None:
        made = Flag._missing_.__func__(kind, value)  # type: ignore[attr-defined]
        if value & ~kind._flag_mask_:  # type: ignore[attr-defined]  # otherwise the class would cache any number of them
            kind._value2member_map_.pop(value, None)
    if not isinstance(made, kind):
        raise ValueError(f"{value} is not a combination of flags")
    return made


def _is_model(kind: type) -> bool:
    """Return whether a type is a pydantic model. A pydantic dataclass counts as a dataclass."""
    return hasattr(kind, "__pydantic_fields__") and not is_dataclass(kind)


def _model(kind: Any, values: dict[str, Any]) -> Any:
    """Create a pydantic model without validation, in the way that pydantic restores copies."""
    from pydantic import BaseModel

    made: Any = object.__new__(kind)
    BaseModel.__setstate__(
        made,
        {
            "__dict__": values,
            "__pydantic_fields_set__": set(values),
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        },
    )
    return made


def _require_plain_fields(kind: type) -> None:
    for name in _fields_of(kind):
        if issubclass(kind, tuple) or _is_model(kind):
            break
        held = getattr_static(kind, name, None)
        if hasattr(type(held), "__set__") and not isinstance(held, MemberDescriptorType):
            raise TypeError(f"{kind.__qualname__}.{name} is a descriptor, and its code would run on received values")


def _fields_of(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a type."""
    if not isinstance(kind, type):
        raise TypeError(f"{kind!r} is not a type")
    if issubclass(kind, Enum):
        return ()
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if _is_model(kind):
        return tuple(kind.__pydantic_fields__)  # type: ignore[attr-defined]
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return tuple(attribute.name for attribute in attributes)
    raise TypeError(
        f"{kind.__qualname__} is not a dataclass, named tuple, enum, pydantic model, attrs class or exception"
    )

"""Plain data: what values may come out of a simulator's process, and how they are written as bytes.

What a pickle holds can call any function of the process that reads it. These bytes hold values of a few types, and
those of types that the reader has declared (`DeclaredTypes`); everything else is malformed. Reading them runs no code
but this package's, and takes memory and time in proportion to their length, which is bounded, as are the number of
values and how deep they lie.

A value is a byte that says its type, and what follows from that. Numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 256 << 20
MOST_ITEMS: Final = 1_000_000
DEEPEST: Final = 100
MOST_ODD_KEYS: Final = 20_000
"""Elements of a set, or keys of a mapping, that are neither texts nor bytes: their hashes can be made to collide."""

DIGITS: Final = 10_000
"""Digits of a decimal or a fraction, and its largest exponent: others are slow to compute with."""

COUNT = struct.Struct("<I")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
TIMEDELTA = struct.Struct("<iii")
DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")
"""Types of NumPy's arrays that are data: numbers, texts and times."""

_SECOND = "'"  # of two moments that a clock shows alike when it is put back


def _moment_to_text(moment: datetime | time) -> str:
    return moment.isoformat() + (_SECOND if moment.fold else "")


def _moment_of_text(kind: type[datetime] | type[time], text: str) -> datetime | time:
    return kind.fromisoformat(text.removesuffix(_SECOND)).replace(fold=int(text.endswith(_SECOND)))


TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime, _moment_to_text, partial(_moment_of_text, datetime)),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, _moment_to_text, partial(_moment_of_text, time)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "Path": (Path, str, Path),
}
"""Types whose values are written as text, by how they are called."""
NUMBERS = ("Decimal", "Fraction")


class NotData(TypeError):
    """A value that is no data.

    Attributes:
        value: the value, or what lies in it.
        why: what is wrong with it.
    """

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(why)
        self.value = value
        self.why = why


class Malformed(ValueError):
    """Bytes that no value is written as."""


def is_huge(text: str) -> bool:
    """Whether a number is too large to be computed with, by its text."""
    _, _, exponent = text.upper().partition("E")
    return len(text) > DIGITS or abs(int(exponent or 0)) > DIGITS

"""Writes plain data: values as bytes."""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

from agentfly.resources.environments.declared_types import DeclaredTypes
from agentfly.resources.environments.plain_data import (
    COMPLEX,
    COUNT,
    DEEPEST,
    DIGITS,
    DTYPE,
    FLOAT,
    INT,
    MOST_BYTES,
    MOST_ITEMS,
    MOST_ODD_KEYS,
    NUMBERS,
    TEXTS,
    TIMEDELTA,
    NotData,
    is_huge,
)

_SHORT = 4  # elements from which on a list of numbers, or texts, is written in one piece
_BY_TYPE = {kind: name for name, (kind, _, _) in TEXTS.items()}


def encode(value: Any, types: DeclaredTypes) -> bytes:
    """A value as bytes.

    Subclasses of the built-in types are written as these. Two references to one object become two objects.

    Raises:
        NotData: it is, or holds, something that is no data; or it is too large.
    """
    writer = _Writer(types)
    try:
        writer.write(value, 0)
    except RecursionError:
        raise NotData(value, "is nested too deeply") from None
    if sum(map(len, writer.parts)) > MOST_BYTES:
        raise NotData(value, f"takes more than {MOST_BYTES >> 20} MiB. Leave it in a file, and give its path")
    return b"".join(writer.parts)


class _Writer:
    def __init__(self, types: DeclaredTypes) -> None:
        self.parts: list[bytes] = []
        self._types = types
        self._items = 0

    def write(self, value: Any, depth: int) -> None:
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value, depth)
        else:
            self._write_other(value, depth)

    def _write_other(self, value: Any, depth: int) -> None:
        kind = type(value)
        if (name := self._types.name_of(kind)) is not None:
            self.parts.append(b"o")
            self._string(name)
            self._sequence(b"t", self._types.parts_of(value), depth)
        elif (text := _BY_TYPE.get(kind)) is not None:
            self._text(text, TEXTS[text][1](value), value)
        elif isinstance(value, PurePath):
            self._text("Path", str(value), value)
        elif kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
            self._numpy(value, numpy)
        elif isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            raise NotData(value, "has a type of its own")
        else:
            base = next((base for base in _BASES if isinstance(value, base)), None)
            if base is None:
                raise NotData(value, "is no data")
            _WRITERS[base](self, value, depth)

    def _count(self, number: int, value: Any, depth: int) -> None:
        self._items += number
        if self._items > MOST_ITEMS:
            raise NotData(
                value, f"makes it more than {MOST_ITEMS:,} values. Give a NumPy array, bytes or a file's path"
            )
        if depth >= DEEPEST:
            raise NotData(value, f"lies more than {DEEPEST} levels deep, or holds itself")
        self.parts.append(COUNT.pack(number))

    def _none(self, value: None, depth: int) -> None:
        self.parts.append(b"N")

    def _bool(self, value: bool, depth: int) -> None:
        self.parts.append(b"T" if value else b"F")

    def _int(self, value: int, depth: int) -> None:
        number = int(value) if type(value) is not int else value
        try:
            self.parts += (b"i", INT.pack(number))
        except struct.error:
            data = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
            self.parts += (b"I", COUNT.pack(len(data)), data)

    def _float(self, value: float, depth: int) -> None:
        self.parts += (b"d", FLOAT.pack(value))

    def _complex(self, value: complex, depth: int) -> None:
        self.parts += (b"c", COMPLEX.pack(value.real, value.imag))

    def _str(self, value: str, depth: int) -> None:
        self.parts.append(b"s")
        self._string(value)

    def _string(self, value: str) -> None:
        data = str.encode(value, "utf-8", "surrogatepass")
        self.parts += (COUNT.pack(len(data)), data)

    def _bytes(self, value: bytes | bytearray, depth: int) -> None:
        self._large(value)
        self.parts += (b"y" if isinstance(value, bytearray) else b"b", COUNT.pack(len(value)), bytes(value))

    def _large(self, value: Any) -> None:
        if len(value) > MOST_BYTES:
            raise NotData(value, f"takes more than {MOST_BYTES >> 20} MiB. Leave it in a file, and give its path")

    def _list(self, value: list[Any], depth: int) -> None:
        self._sequence(b"l", value, depth)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self._sequence(b"t", value, depth)

    def _sequence(self, tag: bytes, value: list[Any] | tuple[Any, ...], depth: int) -> None:
        if len(value) >= _SHORT and (packed := _packed(value)) is not None:
            self.parts += (b"p", tag, packed.typecode.encode())
            self._count(len(value), value, depth)
            self.parts.append(packed.tobytes())
            if packed.typecode == "I":
                self._string("".join(value))
            return
        self.parts.append(tag)
        self._count(len(value), value, depth)
        for item in value:
            self.write(item, depth + 1)

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> None:
        self._odd(value, value)
        self.parts.append(b"z" if isinstance(value, frozenset) else b"e")
        self._count(len(value), value, depth)
        for item in value:
            self.write(item, depth + 1)

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        self._odd(value, dict.keys(value))
        self.parts.append(b"m")
        self._count(len(value), value, depth)
        for key, item in dict.items(value):
            self.write(key, depth + 1)
            self.write(item, depth + 1)

    def _odd(self, value: Any, keys: Iterable[Any]) -> None:
        if len(value) > MOST_ODD_KEYS and sum(not isinstance(key, str | bytes) for key in keys) > MOST_ODD_KEYS:
            raise NotData(value, f"has more than {MOST_ODD_KEYS:,} keys that are no texts. Give a list of pairs")

    def _timedelta(self, value: timedelta, depth: int) -> None:
        self.parts += (b"D", TIMEDELTA.pack(value.days, value.seconds, value.microseconds))

    def _text(self, name: str, text: str, value: Any) -> None:
        if name in NUMBERS and is_huge(text):
            raise NotData(value, f"has more than {DIGITS:,} digits")
        self.parts.append(b"x")
        self._string(name)
        self._string(text)

    def _numpy(self, value: Any, numpy: Any) -> None:
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            raise NotData(value, "is no data")
        dtype = value.dtype.str
        if not DTYPE.fullmatch(dtype):
            raise NotData(value, f"holds {value.dtype}, which is no data. Give arrays of numbers or texts")
        if value.nbytes > MOST_BYTES:
            raise NotData(value, f"takes more than {MOST_BYTES >> 20} MiB. Leave it in a file, and give its path")
        self.parts.append(b"a" if type(value) is numpy.ndarray else b"n")
        self._string(dtype)
        if type(value) is numpy.ndarray:
            self.parts += (COUNT.pack(value.ndim), *map(INT.pack, value.shape))
        data = value.tobytes()
        self.parts += (COUNT.pack(len(data)), data)


def _packed(value: list[Any] | tuple[Any, ...]) -> array.array[Any] | None:
    """A list of numbers of one type, or the lengths of a list of texts; None if it is something else."""
    kinds = set(map(type, value))
    try:
        if kinds == {str}:
            return array.array("I", map(len, value))
        if kinds == {float}:
            return array.array("d", value)
        return array.array("q", value) if kinds == {int} else None
    except OverflowError:
        return None


_WRITERS: dict[type, Callable[[_Writer, Any, int], None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    complex: _Writer._complex,
    str: _Writer._str,
    bytes: _Writer._bytes,
    bytearray: _Writer._bytes,
    list: _Writer._list,
    tuple: _Writer._tuple,
    dict: _Writer._dict,
    set: _Writer._set,
    frozenset: _Writer._set,
    timedelta: _Writer._timedelta,
}
_BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)

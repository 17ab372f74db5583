"""The wire format of simulators' results: encodes values as bytes, and decodes bytes that may be malformed."""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from agentfly.resources.environments.wire_types import (
    COMPLEX,
    COUNT,
    DTYPE,
    FLOAT,
    INT,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ITEMS,
    MAX_OTHER_KEYS,
    NUMBER_TYPES,
    TEXT_TYPES,
    TIMEDELTA,
    DeclaredTypes,
    MalformedData,
    NotSerializable,
    is_huge,
)

_SHORT = 4  # elements from which on a list of numbers, or texts, is written in one piece
_BY_TYPE = {kind: name for name, (kind, _, _) in TEXT_TYPES.items()}


def encode(value: Any, types: DeclaredTypes) -> bytes:
    """A value as bytes.

    Subclasses of the built-in types are written as these. Two references to one object become two objects.

    Raises:
        NotSerializable: it is, or holds, something that is no data; or it is too large.
    """
    writer = _WireEncoder(types)
    try:
        writer.write(value, 0)
    except RecursionError:
        raise NotSerializable(value, "is nested too deeply") from None
    if sum(map(len, writer.parts)) > MAX_BYTES:
        raise NotSerializable(value, f"takes more than {MAX_BYTES >> 20} MiB. Leave it in a file, and give its path")
    return b"".join(writer.parts)


class _WireEncoder:
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
            self._sequence(b"t", self._types.fields_of(value), depth)
        elif (text := _BY_TYPE.get(kind)) is not None:
            self._text(text, TEXT_TYPES[text][1](value), value)
        elif isinstance(value, PurePath):
            self._text("Path", str(value), value)
        elif kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
            self._numpy(value, numpy)
        elif isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            raise NotSerializable(value, "has a type of its own")
        else:
            base = next((base for base in _BASES if isinstance(value, base)), None)
            if base is None:
                raise NotSerializable(value, "is no data")
            _WRITERS[base](self, value, depth)

    def _count(self, number: int, value: Any, depth: int) -> None:
        self._items += number
        if self._items > MAX_ITEMS:
            raise NotSerializable(
                value, f"makes it more than {MAX_ITEMS:,} values. Give a NumPy array, bytes or a file's path"
            )
        if depth >= MAX_DEPTH:
            raise NotSerializable(value, f"lies more than {MAX_DEPTH} levels deep, or holds itself")
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
        if len(value) > MAX_BYTES:
            raise NotSerializable(
                value, f"takes more than {MAX_BYTES >> 20} MiB. Leave it in a file, and give its path"
            )

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
        if len(value) > MAX_OTHER_KEYS and sum(not isinstance(key, str | bytes) for key in keys) > MAX_OTHER_KEYS:
            raise NotSerializable(
                value, f"has more than {MAX_OTHER_KEYS:,} keys that are no texts. Give a list of pairs"
            )

    def _timedelta(self, value: timedelta, depth: int) -> None:
        self.parts += (b"D", TIMEDELTA.pack(value.days, value.seconds, value.microseconds))

    def _text(self, name: str, text: str, value: Any) -> None:
        if name in NUMBER_TYPES and is_huge(text):
            raise NotSerializable(value, f"has more than {MAX_DIGITS:,} digits")
        self.parts.append(b"x")
        self._string(name)
        self._string(text)

    def _numpy(self, value: Any, numpy: Any) -> None:
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            raise NotSerializable(value, "is no data")
        dtype = value.dtype.str
        if not DTYPE.fullmatch(dtype):
            raise NotSerializable(value, f"holds {value.dtype}, which is no data. Give arrays of numbers or texts")
        if value.nbytes > MAX_BYTES:
            raise NotSerializable(
                value, f"takes more than {MAX_BYTES >> 20} MiB. Leave it in a file, and give its path"
            )
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


_WRITERS: dict[type, Callable[[_WireEncoder, Any, int], None]] = {
    type(None): _WireEncoder._none,
    bool: _WireEncoder._bool,
    int: _WireEncoder._int,
    float: _WireEncoder._float,
    complex: _WireEncoder._complex,
    str: _WireEncoder._str,
    bytes: _WireEncoder._bytes,
    bytearray: _WireEncoder._bytes,
    list: _WireEncoder._list,
    tuple: _WireEncoder._tuple,
    dict: _WireEncoder._dict,
    set: _WireEncoder._set,
    frozenset: _WireEncoder._set,
    timedelta: _WireEncoder._timedelta,
}
_BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


def decode(data: bytes, types: DeclaredTypes) -> Any:
    """The value that `agentfly.resources.environments.wire_format.encode` made bytes of.

    Raises:
        MalformedData: they are none of these.
    """
    reader = _WireDecoder(data, types)
    try:
        value = reader.read(0)
    except MalformedData:
        raise
    except Exception as error:  # what the types themselves say to values that they do not have
        raise MalformedData(f"{type(error).__name__}: {error}") from error
    if reader.at != len(data):
        raise MalformedData("something follows the value")
    return value


class _WireDecoder:
    def __init__(self, data: bytes, types: DeclaredTypes) -> None:
        self.at = 0
        self._data = data
        self._types = types
        self._left = MAX_ITEMS

    def read(self, depth: int) -> Any:
        at = self.at
        read = _READERS.get(self._data[at : at + 1])
        if read is None:
            raise MalformedData(f"there is no type {self._data[at : at + 1]!r}")
        self.at = at + 1
        return read(self, depth)

    def _take(self, count: int) -> bytes:
        data = self._data[self.at : self.at + count]
        if len(data) != count:
            raise MalformedData("it ends too early")
        self.at += count
        return data

    def _length(self) -> int:
        length: int = COUNT.unpack(self._take(4))[0]
        return length

    def _count(self, depth: int) -> int:
        count = self._length()
        self._left -= count
        if self._left < 0 or depth >= MAX_DEPTH:
            raise MalformedData("it holds too many values, or they lie too deep")
        return count

    def _int(self, depth: int) -> int:
        number: int = INT.unpack(self._take(8))[0]
        return number

    def _float(self, depth: int) -> float:
        number: float = FLOAT.unpack(self._take(8))[0]
        return number

    def _str(self, depth: int) -> str:
        return self._take(self._length()).decode("utf-8", "surrogatepass")

    def _bytes(self, depth: int) -> bytes:
        return self._take(self._length())

    def _items(self, depth: int) -> list[Any]:
        return [self.read(depth + 1) for _ in range(self._count(depth))]

    def _packed(self, depth: int) -> list[Any] | tuple[Any, ...]:
        tag, code = self._take(1), self._take(1)
        if tag not in (b"l", b"t") or code not in (b"d", b"q", b"I"):
            raise MalformedData("there is no such sequence")
        packed = array.array(code.decode())
        packed.frombytes(self._take(packed.itemsize * self._count(depth)))
        items = self._texts(packed) if code == b"I" else packed.tolist()
        return tuple(items) if tag == b"t" else items

    def _texts(self, lengths: array.array[Any]) -> list[str]:
        text, ends = self._str(0), list(accumulate(lengths))
        if (ends[-1] if ends else 0) != len(text):
            raise MalformedData("texts do not have their lengths")
        return [text[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def _set(self, depth: int) -> set[Any]:
        items = self._items(depth)
        self._refuse_odd(items)
        made: set[Any] = set()
        for item in items:  # one at a time, so that other threads run meanwhile whatever their hashes are
            made.add(item)
        return made

    def _dict(self, depth: int) -> dict[Any, Any]:
        pairs = [(self.read(depth + 1), self.read(depth + 1)) for _ in range(self._count(depth))]
        self._refuse_odd([key for key, _ in pairs])
        made: dict[Any, Any] = {}
        for key, value in pairs:
            made[key] = value
        return made

    def _refuse_odd(self, keys: list[Any]) -> None:
        if sum(not isinstance(key, str | bytes) for key in keys) > MAX_OTHER_KEYS:
            raise MalformedData("it has too many keys that are no texts")

    def _timedelta(self, depth: int) -> timedelta:
        days, seconds, microseconds = TIMEDELTA.unpack(self._take(12))
        return timedelta(days, seconds, microseconds)

    def _text(self, depth: int) -> Any:
        name, text = self._str(depth), self._str(depth)
        if name not in TEXT_TYPES:
            raise MalformedData(f"there is no type {name[:40]!r}")
        if name in NUMBER_TYPES and is_huge(text):
            raise MalformedData("a number has too many digits")
        return TEXT_TYPES[name][2](text)

    def _array(self, depth: int) -> Any:
        numpy, dtype = self._dtype()
        dimensions = self._length()
        if dimensions > 32:
            raise MalformedData("an array has too many dimensions")
        shape = tuple(self._int(depth) for _ in range(dimensions))
        data = self._take(self._length())
        if any(extent < 0 for extent in shape) or math.prod(shape) * dtype.itemsize != len(data):
            raise MalformedData("the content of an array does not have its shape")
        if not data:
            if dtype.itemsize == 0 and math.prod(shape) > MAX_ITEMS:
                raise MalformedData("an array has too many elements")
            return numpy.empty(shape, dtype)
        return numpy.frombuffer(data, dtype).reshape(shape).copy()

    def _scalar(self, depth: int) -> Any:
        numpy, dtype = self._dtype()
        data = self._take(self._length())
        if len(data) != dtype.itemsize:
            raise MalformedData("a number does not have the length of its type")
        return numpy.frombuffer(data, dtype)[0] if data else dtype.type()

    def _dtype(self) -> tuple[Any, Any]:
        name = self._str(0)
        if not DTYPE.fullmatch(name):
            raise MalformedData(f"there is no type {name[:40]!r} of arrays")
        import numpy

        dtype = numpy.dtype(name)
        if dtype.itemsize > MAX_BYTES:
            raise MalformedData("the elements of an array are too large")
        return numpy, dtype

    def _declared(self, depth: int) -> Any:
        name = self._str(depth)
        if self._data[self.at : self.at + 1] not in (b"t", b"p"):
            raise MalformedData("an object has no parts")
        return self._types.build(name, tuple(self.read(depth)))


def _whole(reader: _WireDecoder, depth: int) -> int:
    return int.from_bytes(reader._take(reader._length()), "little", signed=True)


_READERS: dict[bytes, Callable[[_WireDecoder, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b"i": _WireDecoder._int,
    b"I": _whole,
    b"d": _WireDecoder._float,
    b"c": lambda reader, depth: complex(*COMPLEX.unpack(reader._take(16))),
    b"s": _WireDecoder._str,
    b"b": _WireDecoder._bytes,
    b"y": lambda reader, depth: bytearray(reader._bytes(depth)),
    b"l": _WireDecoder._items,
    b"t": lambda reader, depth: tuple(reader._items(depth)),
    b"p": _WireDecoder._packed,
    b"e": _WireDecoder._set,
    b"z": lambda reader, depth: frozenset(reader._set(depth)),
    b"m": _WireDecoder._dict,
    b"D": _WireDecoder._timedelta,
    b"x": _WireDecoder._text,
    b"a": _WireDecoder._array,
    b"n": _WireDecoder._scalar,
    b"o": _WireDecoder._declared,
}

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

_PACK_FROM = 4  # minimum length of a list of numbers or texts that is encoded in one piece
_BY_TYPE = {kind: name for name, (kind, _, _) in TEXT_TYPES.items()}


def encode(value: Any, types: DeclaredTypes) -> bytes:
    """Encode a value as bytes.

    Instances of subclasses of built-in types are encoded as the built-in types. Two references to one object become two
    objects.

    Raises:
        NotSerializable: it is, or contains, something other than data; or it is too large.
    """
    encoder = _WireEncoder(types)
    try:
        encoder.write(value, 0)
    except RecursionError:
        raise NotSerializable(value, "is nested too deeply") from None
    if sum(map(len, encoder.parts)) > MAX_BYTES:
        raise NotSerializable(value, f"takes more than {MAX_BYTES >> 20} MiB. Write it to a file and return the path")
    return b"".join(encoder.parts)


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
            self._write_string(name)
            self._write_sequence(b"t", self._types.fields_of(value), depth)
        elif (text := _BY_TYPE.get(kind)) is not None:
            self._write_text(text, TEXT_TYPES[text][1](value), value)
        elif isinstance(value, PurePath):
            self._write_text("Path", str(value), value)
        elif kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
            self._write_numpy(value, numpy)
        elif isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            raise NotSerializable(value, "has an undeclared type")
        else:
            base = next((base for base in _BASES if isinstance(value, base)), None)
            if base is None:
                raise NotSerializable(value, "is not data")
            _WRITERS[base](self, value, depth)

    def _write_count(self, number: int, value: Any, depth: int) -> None:
        self._items += number
        if self._items > MAX_ITEMS:
            raise NotSerializable(
                value, f"exceeds {MAX_ITEMS:,} values. Return a NumPy array, bytes or the path of a file"
            )
        if depth >= MAX_DEPTH:
            raise NotSerializable(value, f"is nested more than {MAX_DEPTH} levels deep, or contains itself")
        self.parts.append(COUNT.pack(number))

    def write_none(self, value: None, depth: int) -> None:
        self.parts.append(b"N")

    def write_bool(self, value: bool, depth: int) -> None:
        self.parts.append(b"T" if value else b"F")

    def write_int(self, value: int, depth: int) -> None:
        number = int(value) if type(value) is not int else value
        try:
            self.parts += (b"i", INT.pack(number))
        except struct.error:
            data = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
            self.parts += (b"I", COUNT.pack(len(data)), data)

    def write_float(self, value: float, depth: int) -> None:
        self.parts += (b"d", FLOAT.pack(value))

    def write_complex(self, value: complex, depth: int) -> None:
        self.parts += (b"c", COMPLEX.pack(value.real, value.imag))

    def write_str(self, value: str, depth: int) -> None:
        self.parts.append(b"s")
        self._write_string(value)

    def _write_string(self, value: str) -> None:
        data = str.encode(value, "utf-8", "surrogatepass")
        self.parts += (COUNT.pack(len(data)), data)

    def write_bytes(self, value: bytes | bytearray, depth: int) -> None:
        self._check_size(value)
        self.parts += (b"y" if isinstance(value, bytearray) else b"b", COUNT.pack(len(value)), bytes(value))

    def _check_size(self, value: Any) -> None:
        if len(value) > MAX_BYTES:
            raise NotSerializable(
                value, f"takes more than {MAX_BYTES >> 20} MiB. Write it to a file and return the path"
            )

    def write_list(self, value: list[Any], depth: int) -> None:
        self._write_sequence(b"l", value, depth)

    def write_tuple(self, value: tuple[Any, ...], depth: int) -> None:
        self._write_sequence(b"t", value, depth)

    def _write_sequence(self, tag: bytes, value: list[Any] | tuple[Any, ...], depth: int) -> None:
        if len(value) >= _PACK_FROM and (packed := _pack(value)) is not None:
            self.parts += (b"p", tag, packed.typecode.encode())
            self._write_count(len(value), value, depth)
            self.parts.append(packed.tobytes())
            if packed.typecode == "I":
                self._write_string("".join(value))
            return
        self.parts.append(tag)
        self._write_count(len(value), value, depth)
        for item in value:
            self.write(item, depth + 1)

    def write_set(self, value: set[Any] | frozenset[Any], depth: int) -> None:
        self._check_keys(value, value)
        self.parts.append(b"z" if isinstance(value, frozenset) else b"e")
        self._write_count(len(value), value, depth)
        for item in value:
            self.write(item, depth + 1)

    def write_dict(self, value: dict[Any, Any], depth: int) -> None:
        self._check_keys(value, dict.keys(value))
        self.parts.append(b"m")
        self._write_count(len(value), value, depth)
        for key, item in dict.items(value):
            self.write(key, depth + 1)
            self.write(item, depth + 1)

    def _check_keys(self, value: Any, keys: Iterable[Any]) -> None:
        if len(value) > MAX_OTHER_KEYS and sum(not isinstance(key, str | bytes) for key in keys) > MAX_OTHER_KEYS:
            raise NotSerializable(
                value, f"has more than {MAX_OTHER_KEYS:,} keys that are not texts. Return a list of pairs"
            )

    def write_timedelta(self, value: timedelta, depth: int) -> None:
        self.parts += (b"D", TIMEDELTA.pack(value.days, value.seconds, value.microseconds))

    def _write_text(self, name: str, text: str, value: Any) -> None:
        if name in NUMBER_TYPES and is_huge(text):
            raise NotSerializable(value, f"has more than {MAX_DIGITS:,} digits")
        self.parts.append(b"x")
        self._write_string(name)
        self._write_string(text)

    def _write_numpy(self, value: Any, numpy: Any) -> None:
        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            raise NotSerializable(value, "is not data")
        dtype = value.dtype.str
        if not DTYPE.fullmatch(dtype):
            raise NotSerializable(value, f"holds {value.dtype}, which is not data. Return arrays of numbers or texts")
        if value.nbytes > MAX_BYTES:
            raise NotSerializable(
                value, f"takes more than {MAX_BYTES >> 20} MiB. Write it to a file and return the path"
            )
        self.parts.append(b"a" if type(value) is numpy.ndarray else b"n")
        self._write_string(dtype)
        if type(value) is numpy.ndarray:
            self.parts += (COUNT.pack(value.ndim), *map(INT.pack, value.shape))
        data = value.tobytes()
        self.parts += (COUNT.pack(len(data)), data)


def _pack(value: list[Any] | tuple[Any, ...]) -> array.array[Any] | None:
    """Return an array of the numbers, or of the lengths of the texts; None unless all elements have one such type."""
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
    type(None): _WireEncoder.write_none,
    bool: _WireEncoder.write_bool,
    int: _WireEncoder.write_int,
    float: _WireEncoder.write_float,
    complex: _WireEncoder.write_complex,
    str: _WireEncoder.write_str,
    bytes: _WireEncoder.write_bytes,
    bytearray: _WireEncoder.write_bytes,
    list: _WireEncoder.write_list,
    tuple: _WireEncoder.write_tuple,
    dict: _WireEncoder.write_dict,
    set: _WireEncoder.write_set,
    frozenset: _WireEncoder.write_set,
    timedelta: _WireEncoder.write_timedelta,
}
_BASES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


def decode(data: bytes, types: DeclaredTypes) -> Any:
    """Decode bytes that `encode` returned.

    Raises:
        MalformedData: `encode` cannot have returned them.
    """
    decoder = _WireDecoder(data, types)
    try:
        value = decoder.read(0)
    except MalformedData:
        raise
    except Exception as error:  # raised by a type for values that it does not accept
        raise MalformedData(f"{type(error).__name__}: {error}") from error
    if decoder.at != len(data):
        raise MalformedData("bytes follow the value")
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
            raise MalformedData(f"the tag {self._data[at : at + 1]!r} is unknown")
        self.at = at + 1
        return read(self, depth)

    def take(self, count: int) -> bytes:
        data = self._data[self.at : self.at + count]
        if len(data) != count:
            raise MalformedData("it ends too early")
        self.at += count
        return data

    def read_length(self) -> int:
        length: int = COUNT.unpack(self.take(4))[0]
        return length

    def _read_count(self, depth: int) -> int:
        count = self.read_length()
        self._left -= count
        if self._left < 0 or depth >= MAX_DEPTH:
            raise MalformedData("it contains too many values, or nests them too deeply")
        return count

    def read_int(self, depth: int) -> int:
        number: int = INT.unpack(self.take(8))[0]
        return number

    def read_large_int(self, depth: int) -> int:
        return int.from_bytes(self.take(self.read_length()), "little", signed=True)

    def read_complex(self, depth: int) -> complex:
        return complex(*COMPLEX.unpack(self.take(16)))

    def read_float(self, depth: int) -> float:
        number: float = FLOAT.unpack(self.take(8))[0]
        return number

    def read_str(self, depth: int) -> str:
        return self.take(self.read_length()).decode("utf-8", "surrogatepass")

    def read_bytes(self, depth: int) -> bytes:
        return self.take(self.read_length())

    def read_items(self, depth: int) -> list[Any]:
        return [self.read(depth + 1) for _ in range(self._read_count(depth))]

    def read_packed(self, depth: int) -> list[Any] | tuple[Any, ...]:
        tag, code = self.take(1), self.take(1)
        if tag not in (b"l", b"t") or code not in (b"d", b"q", b"I"):
            raise MalformedData("the type of a sequence is unknown")
        packed = array.array(code.decode())
        packed.frombytes(self.take(packed.itemsize * self._read_count(depth)))
        items = self._split(packed) if code == b"I" else packed.tolist()
        return tuple(items) if tag == b"t" else items

    def _split(self, lengths: array.array[Any]) -> list[str]:
        text, ends = self.read_str(0), list(accumulate(lengths))
        if (ends[-1] if ends else 0) != len(text):
            raise MalformedData("the lengths of texts do not add up")
        return [text[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def read_set(self, depth: int) -> set[Any]:
        items = self.read_items(depth)
        self._check_keys(items)
        made: set[Any] = set()
        for item in items:  # one at a time, so that other threads run in between even if hashing is slow
            made.add(item)
        return made

    def read_dict(self, depth: int) -> dict[Any, Any]:
        pairs = [(self.read(depth + 1), self.read(depth + 1)) for _ in range(self._read_count(depth))]
        self._check_keys([key for key, _ in pairs])
        made: dict[Any, Any] = {}
        for key, value in pairs:
            made[key] = value
        return made

    def _check_keys(self, keys: list[Any]) -> None:
        if sum(not isinstance(key, str | bytes) for key in keys) > MAX_OTHER_KEYS:
            raise MalformedData("it has too many keys that are not texts")

    def read_timedelta(self, depth: int) -> timedelta:
        days, seconds, microseconds = TIMEDELTA.unpack(self.take(12))
        return timedelta(days, seconds, microseconds)

    def read_text(self, depth: int) -> Any:
        name, text = self.read_str(depth), self.read_str(depth)
        if name not in TEXT_TYPES:
            raise MalformedData(f"there is no type {name[:40]!r}")
        if name in NUMBER_TYPES and is_huge(text):
            raise MalformedData("a number has too many digits")
        return TEXT_TYPES[name][2](text)

    def read_array(self, depth: int) -> Any:
        numpy, dtype = self._read_dtype()
        dimensions = self.read_length()
        if dimensions > 32:
            raise MalformedData("an array has too many dimensions")
        shape = tuple(self.read_int(depth) for _ in range(dimensions))
        data = self.take(self.read_length())
        if any(extent < 0 for extent in shape) or math.prod(shape) * dtype.itemsize != len(data):
            raise MalformedData("the content of an array does not match its shape")
        if not data:
            if dtype.itemsize == 0 and math.prod(shape) > MAX_ITEMS:
                raise MalformedData("an array has too many elements")
            return numpy.empty(shape, dtype)
        return numpy.frombuffer(data, dtype).reshape(shape).copy()

    def read_scalar(self, depth: int) -> Any:
        numpy, dtype = self._read_dtype()
        data = self.take(self.read_length())
        if len(data) != dtype.itemsize:
            raise MalformedData("the length of a number does not match its type")
        return numpy.frombuffer(data, dtype)[0] if data else dtype.type()

    def _read_dtype(self) -> tuple[Any, Any]:
        name = self.read_str(0)
        if not DTYPE.fullmatch(name):
            raise MalformedData(f"arrays have no type {name[:40]!r}")
        import numpy

        dtype = numpy.dtype(name)
        if dtype.itemsize > MAX_BYTES:
            raise MalformedData("the elements of an array are too large")
        return numpy, dtype

    def read_declared(self, depth: int) -> Any:
        name = self.read_str(depth)
        if self._data[self.at : self.at + 1] not in (b"t", b"p"):
            raise MalformedData("an object has no parts")
        return self._types.build(name, tuple(self.read(depth)))


_READERS: dict[bytes, Callable[[_WireDecoder, int], Any]] = {
    b"N": lambda decoder, depth: None,
    b"T": lambda decoder, depth: True,
    b"F": lambda decoder, depth: False,
    b"i": _WireDecoder.read_int,
    b"I": _WireDecoder.read_large_int,
    b"d": _WireDecoder.read_float,
    b"c": _WireDecoder.read_complex,
    b"s": _WireDecoder.read_str,
    b"b": _WireDecoder.read_bytes,
    b"y": lambda decoder, depth: bytearray(decoder.read_bytes(depth)),
    b"l": _WireDecoder.read_items,
    b"t": lambda decoder, depth: tuple(decoder.read_items(depth)),
    b"p": _WireDecoder.read_packed,
    b"e": _WireDecoder.read_set,
    b"z": lambda decoder, depth: frozenset(decoder.read_set(depth)),
    b"m": _WireDecoder.read_dict,
    b"D": _WireDecoder.read_timedelta,
    b"x": _WireDecoder.read_text,
    b"a": _WireDecoder.read_array,
    b"n": _WireDecoder.read_scalar,
    b"o": _WireDecoder.read_declared,
}

"""Reads plain data: the values that bytes hold, or that they are malformed."""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from typing import Any

from agentfly.resources.environments.declared_types import DeclaredTypes
from agentfly.resources.environments.plain_data import (
    COMPLEX,
    COUNT,
    DEEPEST,
    DTYPE,
    FLOAT,
    INT,
    MOST_BYTES,
    MOST_ITEMS,
    MOST_ODD_KEYS,
    NUMBERS,
    TEXTS,
    TIMEDELTA,
    Malformed,
    is_huge,
)


def decode(data: bytes, types: DeclaredTypes) -> Any:
    """The value that `agentfly.resources.environments.data_writer.encode` made bytes of.

    Raises:
        Malformed: they are none of these.
    """
    reader = _Reader(data, types)
    try:
        value = reader.read(0)
    except Malformed:
        raise
    except Exception as error:  # what the types themselves say to values that they do not have
        raise Malformed(f"{type(error).__name__}: {error}") from error
    if reader.at != len(data):
        raise Malformed("something follows the value")
    return value


class _Reader:
    def __init__(self, data: bytes, types: DeclaredTypes) -> None:
        self.at = 0
        self._data = data
        self._types = types
        self._left = MOST_ITEMS

    def read(self, depth: int) -> Any:
        at = self.at
        read = _READERS.get(self._data[at : at + 1])
        if read is None:
            raise Malformed(f"there is no type {self._data[at : at + 1]!r}")
        self.at = at + 1
        return read(self, depth)

    def _take(self, count: int) -> bytes:
        data = self._data[self.at : self.at + count]
        if len(data) != count:
            raise Malformed("it ends too early")
        self.at += count
        return data

    def _length(self) -> int:
        length: int = COUNT.unpack(self._take(4))[0]
        return length

    def _count(self, depth: int) -> int:
        count = self._length()
        self._left -= count
        if self._left < 0 or depth >= DEEPEST:
            raise Malformed("it holds too many values, or they lie too deep")
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
            raise Malformed("there is no such sequence")
        packed = array.array(code.decode())
        packed.frombytes(self._take(packed.itemsize * self._count(depth)))
        items = self._texts(packed) if code == b"I" else packed.tolist()
        return tuple(items) if tag == b"t" else items

    def _texts(self, lengths: array.array[Any]) -> list[str]:
        text, ends = self._str(0), list(accumulate(lengths))
        if (ends[-1] if ends else 0) != len(text):
            raise Malformed("texts do not have their lengths")
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
        if sum(not isinstance(key, str | bytes) for key in keys) > MOST_ODD_KEYS:
            raise Malformed("it has too many keys that are no texts")

    def _timedelta(self, depth: int) -> timedelta:
        days, seconds, microseconds = TIMEDELTA.unpack(self._take(12))
        return timedelta(days, seconds, microseconds)

    def _text(self, depth: int) -> Any:
        name, text = self._str(depth), self._str(depth)
        if name not in TEXTS:
            raise Malformed(f"there is no type {name[:40]!r}")
        if name in NUMBERS and is_huge(text):
            raise Malformed("a number has too many digits")
        return TEXTS[name][2](text)

    def _array(self, depth: int) -> Any:
        numpy, dtype = self._dtype()
        dimensions = self._length()
        if dimensions > 32:
            raise Malformed("an array has too many dimensions")
        shape = tuple(self._int(depth) for _ in range(dimensions))
        data = self._take(self._length())
        if any(extent < 0 for extent in shape) or math.prod(shape) * dtype.itemsize != len(data):
            raise Malformed("the content of an array does not have its shape")
        if not data:
            if dtype.itemsize == 0 and math.prod(shape) > MOST_ITEMS:
                raise Malformed("an array has too many elements")
            return numpy.empty(shape, dtype)
        return numpy.frombuffer(data, dtype).reshape(shape).copy()

    def _scalar(self, depth: int) -> Any:
        numpy, dtype = self._dtype()
        data = self._take(self._length())
        if len(data) != dtype.itemsize:
            raise Malformed("a number does not have the length of its type")
        return numpy.frombuffer(data, dtype)[0] if data else dtype.type()

    def _dtype(self) -> tuple[Any, Any]:
        name = self._str(0)
        if not DTYPE.fullmatch(name):
            raise Malformed(f"there is no type {name[:40]!r} of arrays")
        import numpy

        dtype = numpy.dtype(name)
        if dtype.itemsize > MOST_BYTES:
            raise Malformed("the elements of an array are too large")
        return numpy, dtype

    def _declared(self, depth: int) -> Any:
        name = self._str(depth)
        if self._data[self.at : self.at + 1] not in (b"t", b"p"):
            raise Malformed("an object has no parts")
        return self._types.made(name, tuple(self.read(depth)))


def _whole(reader: _Reader, depth: int) -> int:
    return int.from_bytes(reader._take(reader._length()), "little", signed=True)


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b"i": _Reader._int,
    b"I": _whole,
    b"d": _Reader._float,
    b"c": lambda reader, depth: complex(*COMPLEX.unpack(reader._take(16))),
    b"s": _Reader._str,
    b"b": _Reader._bytes,
    b"y": lambda reader, depth: bytearray(reader._bytes(depth)),
    b"l": _Reader._items,
    b"t": lambda reader, depth: tuple(reader._items(depth)),
    b"p": _Reader._packed,
    b"e": _Reader._set,
    b"z": lambda reader, depth: frozenset(reader._set(depth)),
    b"m": _Reader._dict,
    b"D": _Reader._timedelta,
    b"x": _Reader._text,
    b"a": _Reader._array,
    b"n": _Reader._scalar,
    b"o": _Reader._declared,
}

"""The wire format: data keeps its values and types, and arbitrary bytes give a value or an error and run nothing."""

from __future__ import annotations

import enum
import math
import pickle
import re
import struct
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import hypothesis.strategies as st
import numpy as np
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import example, given, settings

from agentfly.core.messages import Image
from agentfly.resources.environments.wire_format import decode, encode
from agentfly.resources.environments.wire_types import (
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_OTHER_KEYS,
    DeclaredTypes,
    MalformedData,
    NotSerializable,
)
from tests.support.scale import scaled

NONE = DeclaredTypes()

numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
texts = st.text(st.characters(exclude_categories=()))
leaves = (
    st.none()
    | st.booleans()
    | numbers
    | texts
    | st.binary()
    | st.binary().map(bytearray)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
)
keys = st.none() | st.booleans() | st.integers() | texts | st.binary() | st.tuples(st.integers(), texts)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.lists(st.integers())
        | st.lists(st.floats(allow_nan=False))
        | st.lists(texts)
    ),
    max_leaves=30,
)


def shape(value: Any) -> Any:
    """A value with the types of all that is in it."""
    if isinstance(value, dict):
        return type(value), [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(shape(item)) for item in value)
    return type(value), repr(value)


@pytest.mark.timeout(900)
@settings(max_examples=scaled(60, 5_000))
@given(values)
@example([1, 2, 3, 2**70, -(2**63), 2**63])
@example(["\ud83d", "\ude00", "", "é", "a"] * 2)
@example({0: "a", True: "b", 1.5: "c", (1, "a"): None, b"x": [(), {}, [], set()]})
@example((-0.0, 0.0, math.inf, -math.inf, 5e-324))
@example([True, False, True, False, True])
def test_data_comes_back_as_it_was_with_the_types_of_all_its_parts(value: Any) -> None:
    assert shape(decode(encode(value, NONE), NONE)) == shape(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.zeros((84, 84, 3), np.uint8),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array([], np.float32),
        np.zeros((0, 3)),
        np.zeros((3,), "U0"),
        np.array(3.5),
        np.array([True, False]),
        np.array([1, 2], ">i4"),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([1 + 2j], np.complex64),
        np.array([1.5], np.float16),
    ],
    ids=lambda array: f"{array.dtype.str} {array.shape}",
)
def test_arrays_come_back_with_type_and_shape_and_can_be_written_to(array: np.ndarray[Any, Any]) -> None:
    again = decode(encode(array, NONE), NONE)
    assert (again.dtype, again.shape, again.flags.writeable) == (array.dtype, array.shape, True)
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    "number",
    [np.float64(1.5), np.float32("nan"), np.int8(-3), np.bool_(True), np.str_("é"), np.datetime64("2020-01-01")],
)
def test_numbers_of_numpy_stay_these(number: Any) -> None:
    again = decode(encode(number, NONE), NONE)
    assert type(again) is type(number)
    assert again == number or (again != again and number != number)


class Word(str):
    """A text of a type of its own."""


def test_subclasses_of_what_is_built_in_arrive_as_that() -> None:
    given = [Word("a"), OrderedDict(a=1), defaultdict(list, a=[1]), Counter("aab")]
    again = decode(encode(given, NONE), NONE)
    assert again == ["a", {"a": 1}, {"a": [1]}, {"a": 2, "b": 1}]
    assert [type(one) for one in again] == [str, dict, dict, dict]


class Colour(enum.Enum):
    RED = "red"
    BLUE = object()  # a value that is no data does not matter


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    left: int
    right: Any


@dataclass(frozen=True, slots=True)
class State:
    room: int
    seen: tuple[str, ...] = ()
    colour: Colour = Colour.RED
    derived: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        assert self.room >= 0
        object.__setattr__(self, "derived", self.room * 2)


@attrs.frozen
class Move:
    name: str = attrs.field(alias="called")


class Report(pydantic.BaseModel):
    score: int = pydantic.Field(alias="Score", ge=0)
    moves: list[str] = []


DECLARED = DeclaredTypes((Colour, Rights, Pair, State, Move, Report))
OBJECTS = [
    Colour.BLUE,
    Rights.READ,
    Rights.READ | Rights.WRITE,
    Pair(1, [Colour.RED]),
    State(3, ("hall",), Colour.BLUE),
    Move(called="north"),
    Report(Score=3, moves=["north"]),
    Image(b"\x89PNG", "image/png"),
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_values_of_declared_types_come_back_as_themselves(value: Any) -> None:
    assert decode(encode([value] * 5, DECLARED), DECLARED) == [value] * 5
    assert type(decode(encode(value, DECLARED), DECLARED)) is type(value)


def test_no_code_of_a_declared_type_is_run_to_make_it() -> None:
    bad = object.__new__(State)
    for name, part in {"room": -1, "seen": "x", "colour": None, "derived": 7}.items():
        object.__setattr__(bad, name, part)
    again = decode(encode(bad, DECLARED), DECLARED)
    assert (again.room, again.derived) == (-1, 7)


class Guessing(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("code of the type has run")


class GuessingFlags(enum.IntFlag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("code of the type has run")


class Restoring(pydantic.BaseModel):
    score: int = 0

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("code of the type has run")


@pydantic.dataclasses.dataclass
class Checked:
    score: int = pydantic.Field(ge=0)

    def __post_init__(self) -> None:
        assert self.score != 7, "code of the type has run"


class Forged(DeclaredTypes):
    """Takes values apart as a simulator may that is hostile."""

    parts: tuple[Any, ...] | None = None

    def fields_of(self, value: Any) -> tuple[Any, ...]:
        return super().fields_of(value) if self.parts is None else self.parts


GUARDED = Forged((Guessing, GuessingFlags, Restoring, Checked))


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        *((Guessing.A, parts) for parts in [(None, "x"), (None, 1), ("B",), ([],), (), ("A", 1, 2)]),
        *((GuessingFlags.A, parts) for parts in [(None, "x"), (None, -1), (None, True), (None, [])]),
    ],
)
def test_a_member_that_there_is_not_is_malformed_and_looked_for_by_no_code_of_its_enum(
    value: Any, parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GUARDED, "parts", parts)
    with pytest.raises(MalformedData):
        decode(encode(value, GUARDED), GUARDED)


def test_values_come_back_without_any_hook_of_their_types() -> None:
    low = Checked(3)
    low.score = 7
    values = [Guessing.A, GuessingFlags.A, Restoring(score=3), low]
    assert decode(encode(values, GUARDED), GUARDED) == values


def test_combinations_of_flags_come_back_and_numbers_that_are_none_are_kept_by_no_class() -> None:
    class Bits(enum.IntFlag):
        A = 1
        B = 2

    types = DeclaredTypes((Bits,))
    values = [Bits.A | Bits.B, Bits(0), Bits(64), Bits(65)]
    for unknown in (64, 65):
        Bits._value2member_map_.pop(unknown, None)
    again = decode(encode(values, types), types)
    assert again == values
    assert again[0] is values[0]
    assert {64, 65}.isdisjoint(Bits._value2member_map_)


class Doubling:
    def __set__(self, instance: Any, value: Any) -> None:
        raise AssertionError("code of the type has run")

    def __get__(self, instance: Any, owner: type) -> int:
        return 3


def test_a_field_that_is_a_descriptor_cannot_be_declared() -> None:
    @dataclass(init=False)
    class Described:
        score: Any = Doubling()

    with pytest.raises(TypeError, match=r"Described.score is a descriptor"):
        DeclaredTypes((Described,))


@pytest.mark.parametrize("value", [*OBJECTS[:-1]], ids=lambda value: type(value).__name__)
def test_a_type_that_is_not_declared_is_no_data_on_either_side(value: Any) -> None:
    with pytest.raises(NotSerializable):
        encode({"inside": [value]}, NONE)
    with pytest.raises(MalformedData, match="is not declared"):
        decode(encode(value, DECLARED), NONE)


@pytest.mark.parametrize("kind", [dict, int, type, len, "State", lambda: None])
def test_only_types_with_parts_that_are_known_can_be_declared(kind: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        DeclaredTypes((kind,))


def holding_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "is not data"),
        (len, "is not data"),
        (iter([]), "is not data"),
        (range(3), "is not data"),
        (np.array([object()]), "holds object"),
        (np.zeros(2, [("a", int)]), "which is not data"),
        (np.ma.masked_array([1], [True]), "is not data"),
        (holding_itself(), "contains itself"),
        ([1.5] * (MAX_ITEMS + 1), "exceeds 1,000,000 values"),
        ([[None] * 1000] * 1001, "exceeds 1,000,000 values"),
        (set(range(MAX_OTHER_KEYS + 1)), "keys that are not texts"),
        (Decimal("1E+100000"), "digits"),
    ],
    ids=lambda value: re.sub(r" at 0x.*|(object) .*", "", f"{value!r:.30}"),
)
def test_what_is_no_data_or_too_much_of_it_is_refused_where_it_is_written(value: Any, why: str) -> None:
    with pytest.raises(NotSerializable, match=why):
        encode(value, NONE)


def text(words: str) -> bytes:
    return struct.pack("<I", len(words)) + words.encode()


HOSTILE = {
    "nothing": b"",
    "a pickle": pickle.dumps([1]),
    "an unknown type": b"?",
    "something behind": b"NN",
    "lists in lists": (b"l" + struct.pack("<I", 1)) * (MAX_DEPTH + 1) + b"N",
    "lists in lists in lists": (b"l" + struct.pack("<I", 1)) * 200_000 + b"N",
    "many values that are not there": b"l" + struct.pack("<I", 2**32 - 1),
    "too many values": b"l" + struct.pack("<I", MAX_ITEMS + 1) + b"N" * (MAX_ITEMS + 1),
    "long bytes that are not there": b"b" + struct.pack("<I", 2**32 - 1) + b"x",
    "numbers that are not there": b"pld" + struct.pack("<I", 2**20),
    "numbers of another type": b"plu" + struct.pack("<I", 1) + b"x" * 8,
    "texts without their lengths": b"plI" + struct.pack("<II", 1, 5) + text("abc"),
    "texts of large lengths": b"plI" + struct.pack("<III", 2, 2**32 - 1, 5) + text("abc"),
    "a list as a key": b"m" + struct.pack("<I", 1) + b"l" + struct.pack("<I", 0) + b"N",
    "a list in a set": b"e" + struct.pack("<I", 1) + b"l" + struct.pack("<I", 0),
    "half a character": b"s" + struct.pack("<I", 1) + b"\xc3",
    "a huge fraction": b"x" + text("Fraction") + text("1e999999999"),
    "a huge decimal": b"x" + text("Decimal") + text("1E+999999999"),
    "an unknown text": b"x" + text("module") + text("os"),
    "no date": b"x" + text("date") + text("tomorrow"),
    "no duration": b"D" + struct.pack("<iii", 2**31 - 1, 0, 0),
    "an array of objects": b"a" + text("|O") + struct.pack("<Iq", 1, 1) + struct.pack("<I", 8) + b"x" * 8,
    "an array of records": b"a" + text("i4,O") + struct.pack("<Iq", 1, 1) + struct.pack("<I", 12) + b"x" * 12,
    "an array that is larger": b"a" + text("<i4") + struct.pack("<Iq", 1, 2**40) + struct.pack("<I", 4) + b"x" * 4,
    "an array of less than none": b"a" + text("<i4") + struct.pack("<Iqq", 2, -1, -1) + struct.pack("<I", 4) + b"x" * 4,
    "many empty texts": b"a" + text("<U0") + struct.pack("<Iq", 1, 2**60) + struct.pack("<I", 0),
    "large elements": b"n" + text("<U999999999") + struct.pack("<I", 0),
    "many dimensions": b"a" + text("<i4") + struct.pack("<I", 2**31),
    "an object of no known type": b"o" + text("os:system") + b"t" + struct.pack("<I", 0),
    "an object of an object": (b"o" + text("a:b")) * 5000,
    "a class that is no type": b"o" + text("builtins:eval") + b"t" + struct.pack("<I", 1) + b"N",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_data_is_malformed_and_takes_little_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedData):
            decode(data, DECLARED)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000 + 20 * len(data)
    finally:
        tracemalloc.stop()


written = [encode(value, DECLARED) for value in [*OBJECTS, {"a": [1, 2.5, (None, "x")], "b": np.arange(3)}]]


@pytest.mark.timeout(900)
@settings(max_examples=scaled(150, 20_000))
@given(st.data())
def test_bytes_of_whatever_kind_give_a_value_or_are_malformed(data: Any) -> None:
    mangled = bytearray(data.draw(st.sampled_from(written) | st.binary(max_size=60)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(mangled)))
        mangled[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        decode(bytes(mangled), DECLARED)
    except MalformedData:
        return


def test_times_and_the_like_stay_what_they_are() -> None:
    given = [
        datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
        date(2024, 1, 2),
        time(1, 2, 3),
        timedelta(-1, 2, 3),
        Decimal("1.50"),
        Decimal("NaN"),
        Fraction(1, 3),
        uuid.UUID(int=7),
        Path("a/b"),
    ]
    assert list(map(repr, decode(encode(given, NONE), NONE))) == list(map(repr, given))

"""JSON values of records: any object of a user is stored as a line that can be read again."""

from __future__ import annotations

import datetime
import json
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentfly.core.json_values import MAX_DEPTH, as_finite_float, to_json_line, to_json_value
from tests.support.scale import scaled


class Pair(NamedTuple):
    left: int
    right: Any


class Size(Enum):
    LARGE = "large"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Shelf:
    eggs: int
    more: Any = None


class Basket(BaseModel):
    eggs: int


class Words(str):
    """A text that writes itself in another way."""

    __slots__ = ()

    def __str__(self) -> str:
        return "other words"


class Broken:
    def __repr__(self) -> str:
        raise ValueError("closed")


KEYS = {None: 1, True: 2, 3: 4, 0.5: 5, (1, 2): 6, Size.LARGE: 7}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (Level.HIGH, 3),
        ({"size": Size.LARGE}, {"size": "large"}),
        (math.nan, None),
        ([math.inf, -math.inf, 0.5], [None, None, 0.5]),
        (Pair(1, (2,)), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset("ba"), ["a", "b"]),
        (KEYS, {"null": 1, "true": 2, "3": 4, "0.5": 5, "[1, 2]": 6, "large": 7}),
        (Shelf(2, Shelf(1)), {"eggs": 2, "more": {"eggs": 1, "more": None}}),
        (Basket(eggs=2), {"eggs": 2}),
        (b"a\xff", "a\\xff"),
        (Words("words"), "words"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (datetime.timedelta(hours=1), "1:00:00"),
        (Path("a/b"), "a/b"),
        (Decimal("0.10"), "0.10"),
        (Fraction(1, 3), "1/3"),
        (1 + 2j, "(1+2j)"),
        (ValueError("no"), "no"),
        (OrderedDict(a=1), {"a": 1}),
    ],
    ids=lambda value: repr(sorted(value) if isinstance(value, frozenset) else value),
)
def test_what_has_a_form_in_json_gets_it(value: Any, plain: Any) -> None:
    assert to_json_value(value) == plain
    assert json.loads(to_json_line([value])) == [plain]


def test_numbers_and_arrays_of_numpy_and_torch_are_numbers_and_lists() -> None:
    np = pytest.importorskip("numpy", reason="comes with the extra 'train'")
    torch = pytest.importorskip("torch", reason="comes with the extra 'train'")
    for value, plain in (
        (np.bool_(True), True),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.longdouble(0.5), 0.5),
        (np.str_("text"), "text"),
        (np.array(3), 3),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([0.5, np.inf]), [0.5, None]),
        (np.array([Fraction(1, 2)], dtype=object), ["1/2"]),
        (np.array([(1, 0.5)], dtype=[("n", "i4"), ("x", "f4")]), [[1, 0.5]]),
        (np.datetime64("2020-01-02T03:04:05.000000000"), "2020-01-02T03:04:05.000000000"),
        (np.array([], dtype="f4"), []),
        ({np.int64(3): np.bool_(False)}, {"3": False}),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor([True, False]), [True, False]),
        (torch.tensor([0.5, math.nan], dtype=torch.bfloat16), [0.5, None]),
    ):
        assert to_json_value(value) == plain
        assert type(to_json_value(value)) is type(plain)
        assert json.loads(to_json_line([value])) == [plain]
    assert [as_finite_float(one) for one in (np.bool_(True), np.array(2), torch.tensor(0.5))] == [1.0, 2.0, 0.5]
    assert [as_finite_float(one) for one in (np.array([2.0]), np.float64("nan"), np.str_("1"))] == [None] * 3


def test_what_has_no_form_is_refused_or_stands_there_as_text() -> None:
    for value in (object(), threading.Lock(), print, Shelf):
        with pytest.raises(TypeError, match="has no form in JSON"):
            to_json_value([value])
        assert to_json_value([value], lambda _: "it") == ["it"]
        assert json.loads(to_json_line([value])) == [repr(value)]
    assert json.loads(to_json_line({"it": Broken()}))["it"].endswith(".Broken>")


def test_what_holds_itself_or_lies_too_deep_is_cut_and_says_so() -> None:
    circle: list[Any] = [1]
    circle += [circle, {"again": circle}]
    assert json.loads(to_json_line(circle)) == [1, "(holds itself)", {"again": "(holds itself)"}]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    read = json.loads(to_json_line(deep))
    for _ in range(MAX_DEPTH):
        [read] = read
    assert read == "(too deep to be recorded)"
    with pytest.raises(RecursionError):
        to_json_value(deep)


def test_a_number_of_too_many_digits_is_recorded_in_hexadecimal() -> None:
    assert json.loads(to_json_line({"n": 10**5000})) == {"n": hex(10**5000)}


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.dates(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers() | st.none() | st.booleans(), inner)
        | st.tuples(inner, inner)
        | st.builds(Shelf, st.integers(), inner)
        | st.sets(st.text() | st.integers() | st.none())
    ),
    max_leaves=30,
)


@settings(max_examples=scaled(50, 5_000))
@given(anything)
@example("half \ud800 pair")
@example({"\ud800": [b"\xff", {1: {None: ()}}]})
def test_whatever_is_recorded_is_one_line_that_is_read_as_it_was_converted(value: Any) -> None:
    line = to_json_line(value)
    assert "\n" not in line
    line.encode("utf-8")
    assert json.loads(line) == json.loads(to_json_line(to_json_value(value)))
    assert to_json_value(to_json_value(value)) == to_json_value(value)

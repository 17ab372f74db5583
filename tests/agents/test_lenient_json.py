"""JSON as models write it: it is read as JSON or Python would read it, or is an error with its position."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.core.lenient_json import InvalidJSON, LenientJSONReader, NestingTooDeep, decode_value
from agentfly.formats.toolcalls.json_calls import decode_objects
from tests.support.scale import scaled

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(text: str) -> Any:
    """What the reader of other notations makes of a text, also where it is plain JSON."""
    reader = LenientJSONReader(text, 0, 0)
    value = reader.value()
    assert reader.position == len(text)
    return value


@settings(max_examples=scaled(100, 20_000))
@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_read_as_json_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for found in (read(written), decode_value(written, 0)[0]):
        assert found == value
        assert repr(found) == repr(value)  # 1 is not 1.0, and not true


@settings(max_examples=scaled(100, 20_000))
@given(values)
def test_python_is_read_as_python_reads_it_or_is_an_error(value: Any) -> None:
    try:
        found = read(repr(value))
    except InvalidJSON:
        assert "\\x" in repr(value) or "\\U" in repr(value)  # of which JSON knows nothing
    else:
        assert repr(found) == repr(value)


class Constants(ast.NodeTransformer):
    """Has JSON's names of constants mean Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


pieces = st.sampled_from(
    [
        '"',
        "'",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        " ",
        "\\",
        '"a"',
        "'b'",
        '"a": ',
        "1",
        "-2.5e1",
        "true",
        "True",
        "null",
        "None",
    ]
)


@settings(max_examples=scaled(300, 100_000))
@given(st.lists(pieces | st.characters(codec="ascii", exclude_characters="\n\r\0"), max_size=12).map("".join))
@example('{"a": 1,}')
@example("['a', \"b\",]")
@example('["a" "b"]')
@example("['a' 'b']")
@example('["""a"""]')
@example("{'a': 'it\\'s'}")
@example("{'a': \"it\\'s\"}")
@example("['\\d']")
@example("['\\/', 1,]")
@example("[1_0]")
@example("[01]")
@example("[1,,2]")
@example("[,]")
@example("{,}")
@example("('a',)")
@example("{'a'}")
@example('[u"a"]')
@example("[NaN, Infinity]")
def test_what_is_read_is_what_json_or_python_says(text: str) -> None:
    try:
        value, end = decode_value(text, 0)
    except InvalidJSON:
        return
    try:
        expected = json.loads(text[:end], strict=False)
    except ValueError:
        expected = ast.literal_eval(Constants().visit(ast.parse(text[:end].strip(), mode="eval")))
    assert repr(value) == repr(expected)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a value is missing at its end"),
        ('{"a": x}', "there is no such value, and a text must stand in quotes at character 6, where 'x}' stands"),
        (
            '{"a": "b" c}',
            "',' or '}' is missing at character 10, where 'c}' stands; a quote inside a text is written as",
        ),
        (
            '["a" "b"]',
            "',' or ']' is missing at character 5, where '\"b\"]' stands; a quote inside a text is written as",
        ),
        ('{"a" 1}', "':' is missing behind a name at character 5"),
        ("{a: 1}", "a name in quotes is missing at character 1"),
        ('{"a": "b', "a text is not closed at character 6"),
        ('{"a": {"b": 1}', "',' or '}' is missing at its end"),
        ('["\\d"]', "a backslash in a text must be written as two at character 2"),
        ("['\\x41']", "a backslash in a text must be written as two at character 2"),
        ("[01]", "a value is missing|there is no such value"),
        ("[1,,2]", "a value is missing at character 3"),
        ("['a', NaN]", "NaN is not a JSON value"),
        ("['a', 1e999]", "1e999 is not a finite number"),
        ("['a', " + "9" * 5000 + "]", "too many digits"),
        ("{'a': 1, 'a': 2}", "the name 'a' stands in it twice"),
        ("['\\ud800']", "half of a surrogate pair"),
        ("['a', " + "[" * 100, "nested too deeply"),
    ],
)
def test_an_error_tells_what_is_wrong_and_where(text: str, told: str) -> None:
    with pytest.raises(InvalidJSON) as refused:
        decode_value(text, 0)
    assert any(one in str(refused.value) for one in told.split("|"))


def test_positions_are_counted_from_where_the_text_of_the_model_begins() -> None:
    with pytest.raises(InvalidJSON, match="at character 15, where 'x"):
        decode_objects('>>> {"a": 1} {"b": x}', 4)
    assert decode_objects("{'a': 1},\n{\"b\": 2} .", 0) == ([{"a": 1}, {"b": 2}], 19)


def test_depth_is_bounded_in_both_notations() -> None:
    for quote in ('"', "'"):
        deep = f"{{{quote}a{quote}:" * 101 + "1" + "}" * 101
        with pytest.raises(NestingTooDeep):
            decode_value(deep, 0)
        assert decode_value(deep[5:-1], 0)[1] == len(deep) - 6

from __future__ import annotations

import enum
import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import cloudpickle
import pytest
from pydantic import BaseModel, Field

from agentfly.agents.tool_schema import ArgumentSchema, ToolArgument
from agentfly.core.errors import InvalidArguments
from agentfly.core.json_schema import UntypedText


class Colour(enum.Enum):
    NONE = "none"
    RED = "red"


@dataclass
class Point:
    x: int
    y: int = 0


class Place(BaseModel):
    city: str
    points: list[Point] = []


class Segment(TypedDict):
    start: Point
    note: NotRequired[str]


@dataclass
class Tree:
    """A node."""

    name: str
    kind: Literal["leaf"] = "leaf"
    children: list[Tree] = field(default_factory=list)


def schema_of(**types: Any) -> ArgumentSchema:
    return ArgumentSchema("look", [ToolArgument(name, annotation) for name, annotation in types.items()])


@pytest.mark.parametrize(
    ("annotation", "given", "expected"),
    [
        (bool, "True", True),
        (bool, "false", False),
        (Literal["none", "some"], "none", "none"),
        (Colour, "none", Colour.NONE),
        (int, "5", 5),
        (float, 3, 3.0),
        (list[str], '["a"]', ["a"]),
        (list[int], ["1", 2], [1, 2]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (str, "0123", "0123"),
        (str, 123, "123"),
        (str, "null", "null"),
        (str, '["a"]', '["a"]'),
        (str | None, "null", "null"),
        (str | None, UntypedText("null"), None),
        (str, UntypedText("null"), "null"),
        (int | str, UntypedText("5"), "5"),
        (int, UntypedText("5"), 5),
        (str | None, None, None),
        (str | None, "none", "none"),
        (int | None, "null", None),
        (int | str, "5", "5"),
        (Literal[1, 2], "1", 1),
        (Any, "0123", "0123"),
        (Point, '{"x": "1"}', Point(1)),
        (Place, {"city": "Oslo", "points": [{"x": 1, "y": 2}]}, Place(city="Oslo", points=[Point(1, 2)])),
        (Annotated[int, Field(ge=1)], "1", 1),
        (Place, {"city": "Oslo", "points": '[{"x": "1"}]'}, Place(city="Oslo", points=[Point(1)])),
        (list[Colour], '["none"]', [Colour.NONE]),
        (Segment, {"start": {"x": "1"}, "note": "0123"}, {"start": Point(1), "note": "0123"}),
        (Segment | None, '{"start": {"x": 1}}', {"start": Point(1)}),
        (tuple[int, str], '["1", "2"]', (1, "2")),
        (list[Point | None], '[{"x": "1"}, null]', [Point(1), None]),
        (bool | int, "true", True),
        (int, "5.0", 5),
    ],
)
def test_a_value_is_read_as_the_type_where_that_loses_nothing(annotation: Any, given: Any, expected: Any) -> None:
    value = schema_of(it=annotation).validate({"it": given})["it"]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "given"),
    [
        (int, "five"),
        (int, 5.5),
        (int, None),
        (str, None),
        (str, ["a"]),
        (bool, "perhaps"),
        (Literal["none", "some"], None),
        (Colour, "blue"),
        (list[str], "a"),
        (list[str], '"a"'),
        (float, float("nan")),
        (float, "NaN"),
        (float, float("inf")),
        (Annotated[int, Field(ge=1)], 0),
        (Point, {"y": 1}),
    ],
)
def test_an_impossible_cast_is_refused_with_the_name_of_the_argument(annotation: Any, given: Any) -> None:
    with pytest.raises(InvalidArguments, match=r"'look' was not executed.*\bit"):
        schema_of(it=annotation).validate({"it": given})


@pytest.mark.parametrize(
    ("annotation", "given"),
    [
        (dict[str, int], '{"a": 1, "a": 2}'),
        (list[dict[str, int]], '[{"a": 1, "a": 2}]'),
        (list[str], '["half \\ud800 pair"]'),
        (list[float], "[1e999]"),
        (list[int], "[" * 200 + "]" * 200),
    ],
)
def test_a_text_is_not_read_as_json_where_that_would_lose_something(annotation: Any, given: str) -> None:
    with pytest.raises(InvalidArguments, match="value: "):
        ArgumentSchema("use", [ToolArgument("value", annotation)]).validate({"value": given})


@pytest.mark.parametrize("annotation", [Iterable[int], Iterable[int] | None, Annotated[Iterable[int], "numbers"]])
def test_an_iterable_is_a_list_that_is_checked_before_the_call(annotation: Any) -> None:
    schema = ArgumentSchema("use", [ToolArgument("value", annotation)])
    assert schema.validate({"value": '["1", 2]'}) == {"value": [1, 2]}
    for wrong in ("a", {"a": 1}, ["a"]):
        with pytest.raises(InvalidArguments, match="value"):
            schema.validate({"value": wrong})


@pytest.mark.parametrize("default", [float("inf"), [float("nan")]])
def test_a_default_that_json_cannot_show_is_left_out(default: Any) -> None:
    shown = ArgumentSchema("use", [ToolArgument("value", Any, required=False, default=default)]).json_schema
    assert "default" not in shown["properties"]["value"]
    json.dumps(shown, allow_nan=False)


def test_missing_and_surplus_names_are_named_beside_the_expected_ones() -> None:
    schema = ArgumentSchema("look", [ToolArgument("city", str), ToolArgument("days", int, required=False, default=1)])
    with pytest.raises(InvalidArguments) as refused:
        schema.validate({"town": "Oslo"})
    message = str(refused.value)
    assert "city is missing" in message
    assert "'town' is not among them" in message
    assert "It takes: city (string), days (integer, optional)." in message
    assert 'You gave: {"town": "Oslo"}' in message


def test_what_was_given_is_repeated_only_in_part_when_it_is_long() -> None:
    garbage = {"x" * 50_000: 1, **{f"name{number}": "y" * 1000 for number in range(50)}}
    with pytest.raises(InvalidArguments) as refused:
        schema_of(it=int).validate(garbage)
    assert len(str(refused.value)) < 2_000


def test_arguments_that_are_not_given_are_left_to_the_functions_defaults() -> None:
    schema = ArgumentSchema("look", [ToolArgument("days", int, required=False, default=1)])
    assert schema.validate({}) == {}


def test_the_json_schema_tells_types_descriptions_defaults_and_what_is_required() -> None:
    schema = ArgumentSchema(
        "look",
        [
            ToolArgument("city", str, "where to look"),
            ToolArgument("unit", Literal["c", "f"], required=False, default="c"),
            ToolArgument("near", str | None, required=False),
        ],
    )
    assert schema.json_schema == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where to look"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "near": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_names_that_mean_something_to_pydantic_are_ordinary_names() -> None:
    names = ["schema", "json", "model_config", "copy", "title", "_private", "argument_0"]
    schema = ArgumentSchema("look", [ToolArgument(name, int) for name in names])
    assert schema.validate(dict.fromkeys(names, "1")) == dict.fromkeys(names, 1)
    assert list(schema.json_schema["properties"]) == names


def test_a_type_without_json_form_is_refused_with_the_name_of_the_argument() -> None:
    class Live:
        pass

    with pytest.raises(TypeError, match="handle"):
        schema_of(city=str, handle=Live)


def test_a_schema_survives_pickling() -> None:
    schema = ArgumentSchema("look", [ToolArgument("where", list[Point]), ToolArgument("how", str | None)])
    copy = pickle.loads(cloudpickle.dumps(schema))
    assert copy.json_schema == schema.json_schema
    assert copy.validate({"where": '[{"x": 1}]', "how": None}) == {"where": [Point(1)], "how": None}


def test_the_json_schema_is_json() -> None:
    schema = ArgumentSchema("look", [ToolArgument("at", Place, required=False, default=Place(city="Oslo"))])
    assert json.loads(json.dumps(schema.json_schema)) == schema.json_schema
    assert schema.json_schema["properties"]["at"]["default"] == {"city": "Oslo", "points": []}


def test_the_json_schema_has_no_references_which_chat_templates_do_not_know() -> None:
    schema = ArgumentSchema(
        "look",
        [
            ToolArgument("tree", Tree, "where"),
            ToolArgument("colour", Colour),
            ToolArgument("way", Segment),
            ToolArgument("by", Place),
        ],
    )
    text = json.dumps(schema.json_schema)
    assert "$ref" not in text
    assert "$defs" not in text
    tree, colour = (schema.json_schema["properties"][name] for name in ("tree", "colour"))
    assert tree["description"] == "where"
    assert tree["properties"]["kind"] == {"type": "string", "default": "leaf", "enum": ["leaf"]}
    assert tree["properties"]["children"]["items"] == {"type": "object"}  # a tree in a tree in a tree …
    assert colour == {"type": "string", "enum": ["none", "red"]}
    assert schema.describe().startswith('tree (object), colour (one of "none", "red"), way (object)')


def test_a_type_that_holds_itself_is_read_to_its_depth() -> None:
    given = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}
    assert schema_of(it=Tree).validate({"it": json.dumps(given)}) == {
        "it": Tree("a", children=[Tree("b", children=[Tree("c")])])
    }


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(InvalidArguments, match="was not executed"):
        schema_of(it=list[str]).validate({"it": deep})

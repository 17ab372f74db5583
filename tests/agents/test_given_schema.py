"""Arguments of tools that somebody else has described by a JSON schema."""

from __future__ import annotations

import json
import pickle
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("jsonschema", reason="pip install 'agentfly-rl[mcp]'")

from agentfly.agents.given_schema import GivenSchema
from agentfly.errors import InvalidArguments, ToolDefinitionError

POINT = {"type": "object", "title": "Point", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "definitions": {
        "Point": POINT,
        "Tree": {
            "type": "object",
            "properties": {"inner": {"$ref": "#/definitions/Tree"}, "at": {"$ref": "#/definitions/Point"}},
        },
    },
    "properties": {
        "query": {"type": "string", "description": "what to look for"},
        "limit": {"type": "integer", "default": 10, "minimum": 1},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["none", "some"]},
        "near": {"anyOf": [{"$ref": "#/definitions/Point"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "tree": {"$ref": "#/definitions/Tree"},
        "ratio": {"type": "number"},
        "mode": {"const": "fast"},
    },
    "required": ["query"],
}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("flag", "True", True),
        ("kind", "none", "none"),
        ("limit", "5", 5),
        ("limit", 5.0, 5),
        ("ratio", "5", 5),
        ("tags", '["a"]', ["a"]),
        ("query", "0123", "0123"),
        ("query", "null", "null"),
        ("note", "null", None),
        ("note", "none", "none"),
        ("near", "null", None),
        ("near", '{"x": "1"}', {"x": 1}),
        ("tree", {"at": '{"x": "1"}', "inner": {"at": {"x": 2}}}, {"at": {"x": 1}, "inner": {"at": {"x": 2}}}),
    ],
)
def test_a_value_is_read_as_the_schema_wants_it_where_that_loses_nothing(name: str, given: Any, expected: Any) -> None:
    read = GivenSchema("look", SCHEMA).validate({"query": "q", name: given})["arguments"][name]
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "'query' is a required property"),
        ({"query": "q", "limit": "many"}, "limit: 'many' is not of type 'integer'"),
        ({"query": "q", "limit": 0}, "limit: 0 is less than the minimum of 1"),
        ({"query": "q", "kind": "other"}, "kind: 'other' is not one of"),
        ({"query": "q", "tree": {"at": {"y": 1}}}, "tree.at: 'x' is a required property"),
        ({"query": "q", "qurey": "q"}, "'qurey' is not among them"),
        ({"query": "q", "ratio": float("nan")}, "numbers must be finite"),
        ({"query": None}, "query: None is not of type 'string'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_expected(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArguments) as refused:
        GivenSchema("look", SCHEMA).validate(given)
    assert told in str(refused.value)
    assert "It takes: query (string), limit (integer, optional)" in str(refused.value)


def test_a_schema_is_shown_without_references_and_constants() -> None:
    shown = GivenSchema("look", SCHEMA).json_schema
    assert "$ref" not in json.dumps(shown)
    assert set(shown) == {"type", "properties", "required"}
    assert shown["properties"]["tree"]["properties"]["inner"] == {"type": "object"}
    assert shown["properties"]["near"]["anyOf"][0] == {key: POINT[key] for key in ("type", "properties", "required")}
    assert shown["properties"]["mode"] == {"enum": ["fast"]}


def test_other_names_are_let_through_where_the_schema_lets_them() -> None:
    given = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    assert GivenSchema("look", given).validate({"any": "5"}) == {"arguments": {"any": 5}}
    assert GivenSchema("look", {"type": "object"}).validate({}) == {"arguments": {}}


def test_a_part_of_a_schema_that_lies_elsewhere_is_left_to_whoever_has_it() -> None:
    schema = {"type": "object", "properties": {"at": {"$ref": "https://example.org/point.json"}}}
    assert GivenSchema("look", schema).validate({"at": {"x": 1}}) == {"arguments": {"at": {"x": 1}}}


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "objekt"}, {"properties": 3}])
def test_what_is_no_schema_of_an_object_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match="The JSON schema of the tool 'look'"):
        GivenSchema("look", schema)


def test_a_schema_survives_pickling() -> None:
    copy = pickle.loads(cloudpickle.dumps(GivenSchema("look", SCHEMA)))
    assert copy.json_schema == GivenSchema("look", SCHEMA).json_schema
    assert copy.validate({"query": "q"}) == {"arguments": {"query": "q"}}

"""Arguments of tools with a given JSON schema."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema", reason="pip install 'agentfly-rl[mcp]'")

from agentfly.agents.tool_schema import JSONSchemaArguments
from agentfly.core.errors import InvalidArguments, ToolDefinitionError
from agentfly.core.json_schema import UntypedText
from tests.support.scale import scaled

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
        ("note", "null", "null"),
        ("note", UntypedText("null"), None),
        ("note", "none", "none"),
        ("near", "null", None),
        ("near", '{"x": "1"}', {"x": 1}),
        ("tree", {"at": '{"x": "1"}', "inner": {"at": {"x": 2}}}, {"at": {"x": 1}, "inner": {"at": {"x": 2}}}),
    ],
)
def test_a_value_is_read_as_the_schema_wants_it_where_that_loses_nothing(name: str, given: Any, expected: Any) -> None:
    read = JSONSchemaArguments("look", SCHEMA).validate({"query": "q", name: given})["arguments"][name]
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
        JSONSchemaArguments("look", SCHEMA).validate(given)
    assert told in str(refused.value)
    assert "It takes: query (string), limit (integer, optional)" in str(refused.value)


def test_a_schema_is_shown_without_references_and_constants() -> None:
    shown = JSONSchemaArguments("look", SCHEMA).json_schema
    assert "$ref" not in json.dumps(shown)
    assert set(shown) == {"type", "properties", "required"}
    assert shown["properties"]["tree"]["properties"]["inner"] == {"type": "object"}
    assert shown["properties"]["near"]["anyOf"][0] == {key: POINT[key] for key in ("type", "properties", "required")}
    assert shown["properties"]["mode"] == {"enum": ["fast"]}


def test_other_names_are_let_through_where_the_schema_lets_them() -> None:
    given = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    assert JSONSchemaArguments("look", given).validate({"any": "5"}) == {"arguments": {"any": 5}}
    assert JSONSchemaArguments("look", {"type": "object"}).validate({}) == {"arguments": {}}


def test_a_part_of_a_schema_that_lies_elsewhere_is_left_to_whoever_has_it() -> None:
    schema = {"type": "object", "properties": {"at": {"$ref": "https://example.org/point.json"}}}
    assert JSONSchemaArguments("look", schema).validate({"at": {"x": 1}}) == {"arguments": {"at": {"x": 1}}}


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_nothing_that_a_schema_refers_to_is_fetched(keyword: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"enum": ["of the host"]}')
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        for address in (file.as_uri(), f"http://127.0.0.1:{server.getsockname()[1]}/schema", "ftp://127.0.0.1/x"):
            schema = JSONSchemaArguments("look", {"properties": {"a": {keyword: address}}})
            assert schema.validate({"a": "x"}) == {"arguments": {"a": "x"}}
        with pytest.raises(BlockingIOError):
            server.accept()


def _doubling(levels: int, keyword: str) -> dict[str, Any]:
    """A schema whose evaluation takes two to the power of its levels."""
    definitions: dict[str, Any] = {str(levels): {}}
    for n in range(levels):
        one = {"$ref": f"#/$defs/{n + 1}"}
        definitions[str(n)] = {keyword: [one, one]}
    return {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": definitions}


COSTLY: dict[str, tuple[dict[str, Any], Any]] = {
    "a pattern in a part that names its draft": (
        {"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}}},
        "a" * 5000 + "!",
    ),
    "a pattern": ({"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}, "a" * 5000 + "!"),
    "a pattern of names": ({"properties": {"a": {"patternProperties": {"^(a+)+$": {}}}}}, {"a" * 5000 + "!": 1}),
    "a pattern of names beside": (
        {"properties": {"a": {"additionalProperties": False, "patternProperties": {"^(a+)+$": {}}}}},
        {"a" * 5000 + "!": 1},
    ),
    "a pattern of what is not evaluated": (
        {"properties": {"a": {"unevaluatedProperties": False, "allOf": [{"patternProperties": {"^(a+)+$": {}}}]}}},
        {"a" * 5000 + "!": 1},
    ),
    "all of two of two": (_doubling(60, "allOf"), "x"),
    "any of two of two": (_doubling(60, "anyOf"), "x"),
    "items that must differ": ({"properties": {"a": {"uniqueItems": True}}}, [{"n": n} for n in range(50_000)]),
    "many choices": (
        {"properties": {"a": {"items": {"enum": [[n] for n in range(20_000)]}}}},
        ["x"] * 1_000,
    ),
}


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.timeout(60)
def test_a_check_that_would_take_for_ever_is_left_to_the_server(name: str) -> None:
    schema, value = COSTLY[name]
    with contextlib.suppress(InvalidArguments):
        JSONSchemaArguments("look", schema).validate({"a": value})


def test_a_schema_that_takes_for_ever_to_check_is_refused() -> None:
    choices = [{"n": n} for n in range(20_000)]
    draft = "http://json-schema.org/draft-04/schema#"  # which wants choices to differ
    with pytest.raises(ToolDefinitionError, match="too large"):
        JSONSchemaArguments("look", {"$schema": draft, "properties": {"a": {"enum": choices}}})


def test_patterns_are_checked_by_an_engine_that_knows_their_dialect() -> None:
    given = JSONSchemaArguments("look", {"properties": {"a": {"type": "string", "pattern": r"^\p{Lu}\d+$"}}})
    assert given.validate({"a": "É12"}) == {"arguments": {"a": "É12"}}
    with pytest.raises(InvalidArguments, match="does not match"):
        given.validate({"a": "e12"})


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "objekt"}, {"properties": 3}])
def test_what_is_no_schema_of_an_object_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match="The JSON schema of the tool 'look'"):
        JSONSchemaArguments("look", schema)


def test_a_schema_survives_pickling() -> None:
    copy = pickle.loads(cloudpickle.dumps(JSONSchemaArguments("look", SCHEMA)))
    assert copy.json_schema == JSONSchemaArguments("look", SCHEMA).json_schema
    assert copy.validate({"query": "q"}) == {"arguments": {"query": "q"}}


# --- schemas of true and false ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"data": True}},
        {"properties": {"data": {"$ref": "#/$defs/Any"}}, "$defs": {"Any": True}},
        {"properties": {"data": {"anyOf": [True, {"type": "integer"}]}}},
        {"properties": {"data": {"type": ["array", "object", "string", "integer"], "items": True}}},
        {"properties": {"other": False}, "additionalProperties": True},
        {"required": ["data"]},
        {"allOf": [{"properties": {"data": True}}, True]},
        {"type": ["object", "null"], "properties": {"data": True}},
        True,
    ],
)
@pytest.mark.parametrize("value", [3, "3", "null", ["a", {"b": None}], {"a": [1]}])
def test_where_any_value_is_allowed_it_is_taken_as_it_is(schema: Any, value: Any) -> None:
    one = JSONSchemaArguments("look", schema)
    assert one.validate({"data": value}) == {"arguments": {"data": value}}
    assert "look" in str(one.refusal({"data": value}, ["it does not fit"]))
    assert all(isinstance(part, dict) for part in one.json_schema["properties"].values())
    assert pickle.loads(cloudpickle.dumps(one)).json_schema == one.json_schema


def test_a_value_that_is_never_allowed_is_refused() -> None:
    for schema in ({"properties": {"a": True, "b": False}}, {"properties": {"b": {"not": {}}}}):  # type: ignore[var-annotated]
        with pytest.raises(InvalidArguments):
            JSONSchemaArguments("look", schema).validate({"b": 1})
    with pytest.raises(ToolDefinitionError, match="The JSON schema of the tool 'look' is none: False"):
        JSONSchemaArguments("look", False)


def test_values_that_a_schema_holds_are_not_taken_for_schemas() -> None:
    default = {"title": "kept", "$ref": "#/nowhere", "properties": {"title": True}}
    schema = {"properties": {"title": {"type": "object", "default": default, "examples": [default]}}}
    shown = JSONSchemaArguments("look", schema).json_schema["properties"]["title"]
    assert (shown["default"], shown["examples"]) == (default, [default])


def test_a_pattern_of_another_dialect_is_left_to_whoever_knows_it() -> None:
    given = JSONSchemaArguments("look", {"properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}})
    assert given.validate({"a": "é"}) == {"arguments": {"a": "é"}}


def test_types_that_hold_one_another_are_written_out_within_bounds() -> None:
    names = "abcdefghij"
    types = {
        name: {"type": "object", "properties": {one: {"$ref": f"#/$defs/{one}"} for one in names}} for name in names
    }
    shown = JSONSchemaArguments("look", {"$defs": types, "properties": types["a"]["properties"]}).json_schema
    assert len(json.dumps(shown)) < 1_000_000


KEYWORDS = [
    "type",
    "properties",
    "required",
    "items",
    "anyOf",
    "allOf",
    "not",
    "$ref",
    "$defs",
    "a",
    "b",
    "enum",
    "const",
    "default",
    "pattern",
    "format",
    "title",
    "if",
    "additionalProperties",
    "patternProperties",
    "prefixItems",
    "description",
    "$schema",
    "$id",
    "minimum",
    "propertyNames",
]

parts = st.recursive(
    st.sampled_from(
        [True, False, None, 1, "a", "object", "string", "array", "#", "#/properties/a", "#/$defs/b", "x/y", "("]
    )
    | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYWORDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)

schemas = parts | st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("abc"), parts, max_size=3)})


@settings(max_examples=scaled(150, 10_000))
@given(schemas, st.dictionaries(st.sampled_from("abc"), parts, max_size=3))
@example({"properties": {"a": {"pattern": "("}}}, {"a": "b"})
@example({"properties": {"a": {"$ref": "#/properties/a"}}}, {"a": "b"})
@example({"$schema": {}, "properties": {"a": {"$ref": "#/properties/b"}}}, {"a": "b"})
@example({"type": 3}, {})
@example({"patternProperties": {"(": True}}, {"a": 1})
def test_whatever_a_schema_says_a_call_is_taken_or_refused(schema: Any, given_arguments: dict[str, Any]) -> None:
    try:
        one = JSONSchemaArguments("look", schema)
    except ToolDefinitionError:
        return
    one.describe()
    json.dumps(one.json_schema)
    try:
        assert list(one.validate(given_arguments)) == ["arguments"]
    except InvalidArguments as refused:
        assert "The call of 'look' was not executed" in str(refused)  # noqa: PT017

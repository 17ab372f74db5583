"""JSON schemas as plain dicts: simplified for chat templates, described in words, and used to coerce values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from agentfly.core.lenient_json import InvalidJSON, decode_value

Schema = Mapping[str, Any]

_CHOICES = ("anyOf", "oneOf")
_ROOTS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", "dependentSchemas", *_ROOTS)  # keywords that hold schemas by name
_LISTED = ("allOf", "prefixItems", *_CHOICES)
_SINGLE = ("items", "not", "if", "then", "else", "contains", "propertyNames", "contentSchema")
_OTHERS = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_MOST_INLINED = 1_000  # references: types that hold one another would else be written out in every order
_NOTHING: Schema = {"not": {}}


class UntypedText(str):
    """A text from a format that writes all values as text, where ``null`` may mean null or the text."""

    __slots__ = ()


def simplify_schema(schema: Schema) -> dict[str, Any]:
    """Return a schema without references, constants, titles, or the schemas ``true`` and ``false``.

    References are inlined. In a recursive type only ``type`` is kept of the inner schema. ``true`` becomes the empty
    schema, and ``false`` one that nothing fits. Chat templates do not support references, few support constants, and
    they ask for the type of every argument. Values within schemas, such as defaults, stay as they are.
    """
    inlined = _Inliner(schema).plain(schema, ())
    return {key: value for key, value in inlined.items() if key not in (*_ROOTS, "$schema")}


class _Inliner:
    """Simplifies the schemas of one document."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MOST_INLINED

    def plain(self, node: Any, path: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema of the document simplified. ``path`` has the references that led to it."""
        if not isinstance(node, Mapping):
            return dict(_NOTHING) if node is False else {}
        if isinstance(reference := node.get("$ref"), str):
            return self._resolved(node, reference, path)
        simple = {key: self._part(key, value, path) for key, value in node.items() if key != "title"}
        if "const" in simple:
            simple["enum"] = [simple.pop("const")]
        return simple

    def _part(self, keyword: str, value: Any, path: tuple[str, ...]) -> Any:
        """Return the value of a keyword, with the schemas in it simplified."""
        if keyword in _NAMED and isinstance(value, Mapping):
            return {name: self.plain(one, path) for name, one in value.items()}
        if (keyword in _LISTED or keyword == "items") and isinstance(value, list):
            return [self.plain(one, path) for one in value]
        if keyword in _SINGLE or (keyword in _OTHERS and isinstance(value, Mapping)):
            return self.plain(value, path)
        return value

    def _resolved(self, node: Schema, reference: str, path: tuple[str, ...]) -> dict[str, Any]:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        target = _target(reference, self._root)
        if target is None:
            return self.plain(beside, path)
        self._left -= 1
        if reference in path or self._left < 0:
            target = {key: target[key] for key in ("type",) if key in target}
        return self.plain({**target, **beside}, (*path, reference))


def _target(reference: str, root: Schema) -> Schema | None:
    """Return the target of a reference within the document; None for a reference to another document."""
    found: Any = root
    for written in reference.removeprefix("#").strip("/").split("/"):
        step = unquote(written).replace("~1", "/").replace("~0", "~")
        if step and not (isinstance(found, Mapping) and step in found):
            return None
        found = found[step] if step else found
    if isinstance(found, bool):
        found = {} if found else _NOTHING
    return found if isinstance(found, Mapping) and reference.startswith("#") else None


def describe_type(schema: Schema) -> str:
    """Describe the type of a value in JSON's terms, for instance ``array of string``.

    Args:
        schema: a schema as `simplify_schema` makes it.
    """
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    for choice in _CHOICES:
        if choice in schema:
            return " or ".join(describe_type(one) for one in schema[choice])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"array of {describe_type(schema['items'])}"
    return str(kind)


def coerce_to_schema(value: Any, schema: Schema) -> Any:
    """Convert a value to its schema's type, where a model wrote it in another form and the conversion is lossless.

    Texts are parsed as JSON where the schema does not allow text: ``"5"``, ``"True"``, ``'["a"]'`` and ``"null"``
    become a number, a boolean, a list and null. A value that may be text stays as it is, except that an `UntypedText`
    of ``null`` becomes null where that is allowed. A value that cannot be converted stays, for validation to report.

    Args:
        value: a JSON value.
        schema: a schema as `simplify_schema` makes it.
    """
    if not isinstance(value, (str, dict, list, float)):
        return value
    if isinstance(value, str):
        may_be_text = _may_be_text(schema)
        if value == "null" and _allows(schema, "null") and (isinstance(value, UntypedText) or not may_be_text):
            return None
        value = str(value)
        if may_be_text:
            return value
        value = _read_text(value, schema)
    if isinstance(value, float) and value.is_integer() and _allows(schema, "integer") and not _allows(schema, "number"):
        return int(value)
    for choice in _CHOICES:
        if choice not in schema:
            continue
        fitting = [one for one in schema[choice] if _allows(one, _kind(value))]
        if len(fitting) == 1:
            return coerce_to_schema(value, fitting[0])
    if isinstance(value, dict):
        return _read_object(value, schema)
    if isinstance(value, list):
        return _read_array(value, schema)
    return value


def _read_text(text: str, schema: Schema) -> Any:
    if _allows(schema, "boolean") and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    written = text.strip()
    try:
        read, end = decode_value(written, 0)
    except InvalidJSON:
        return text
    return text if isinstance(read, str) or end < len(written) else read


def _read_object(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    known = schema.get("properties", {})
    if known.keys() >= value.keys():
        return {name: coerce_to_schema(one, known[name]) for name, one in value.items()}
    others = schema.get("additionalProperties")
    others = others if isinstance(others, Mapping) else {}
    return {name: coerce_to_schema(one, known.get(name, others)) for name, one in value.items()}


def _read_array(value: list[Any], schema: Schema) -> list[Any]:
    first: Sequence[Any] = schema.get("prefixItems", ())
    rest = schema.get("items")
    rest = rest if isinstance(rest, Mapping) else {}
    return [coerce_to_schema(one, first[index] if index < len(first) else rest) for index, one in enumerate(value)]


def _may_be_text(schema: Schema) -> bool:
    if "enum" in schema:
        return any(isinstance(one, str) for one in schema["enum"])
    if any(choice in schema for choice in _CHOICES):
        return any(_may_be_text(one) for choice in _CHOICES for one in schema.get(choice, ()))
    return "type" not in schema or _allows(schema, "string")


def _allows(schema: Schema, kind: str) -> bool:
    """Whether a schema allows a type by name."""
    if any(choice in schema for choice in _CHOICES):
        return any(_allows(one, kind) for choice in _CHOICES for one in schema.get(choice, ()))
    named = schema.get("type")
    return kind in named if isinstance(named, list) else kind == named


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return kinds.get(type(value), "null")

"""JSON schemas as plain dicts: made simple enough for chat templates, said in words, and followed in reading values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.json_reader import NotJSON, decode_value

Schema = Mapping[str, Any]

_CHOICES = ("anyOf", "oneOf")
_ROOTS = ("$defs", "definitions")


def plain(schema: Schema) -> dict[str, Any]:
    """A schema without references, constants, or the titles that are derived from names.

    What a reference points to stands in its place; where that would go on for ever, because a type holds itself, only
    the type of the inner one is left. Chat templates know no references, and few of them know constants.
    """
    inlined: dict[str, Any] = _plain(schema, schema, ())
    return {key: value for key, value in inlined.items() if key not in (*_ROOTS, "$schema")}


def _plain(node: Any, root: Schema, path: tuple[str, ...], *, names: bool = False) -> Any:
    """The same for a part. ``names`` tells that the keys are a user's."""
    if isinstance(node, list):
        return [_plain(one, root, path) for one in node]
    if not isinstance(node, Mapping):
        return node
    if not names and isinstance(reference := node.get("$ref"), str):
        return _resolved(node, reference, root, path)
    simple = {
        key: _plain(value, root, path, names=not names and key in ("properties", *_ROOTS))
        for key, value in node.items()
        if names or not (key == "title" and isinstance(value, str))
    }
    if not names and "const" in simple:
        simple["enum"] = [simple.pop("const")]
    return simple


def _resolved(node: Schema, reference: str, root: Schema, path: tuple[str, ...]) -> Any:
    beside = {key: value for key, value in node.items() if key != "$ref"}
    target = _target(reference, root)
    if target is None:
        return _plain({"type": "object", **beside}, root, path)
    if reference in path:
        return _plain({"type": target.get("type", "object"), **beside}, root, path)
    return _plain({**target, **beside}, root, (*path, reference))


def _target(reference: str, root: Schema) -> Schema | None:
    """What a reference within the document points to; None for one that leads elsewhere."""
    found: Any = root
    for written in reference.removeprefix("#").strip("/").split("/"):
        step = written.replace("~1", "/").replace("~0", "~")
        if step and not (isinstance(found, Mapping) and step in found):
            return None
        found = found[step] if step else found
    return found if isinstance(found, Mapping) and reference.startswith("#") else None


def in_words(schema: Schema) -> str:
    """The type of a value in JSON's words, for instance ``array of string``."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    for choice in _CHOICES:
        if choice in schema:
            return " or ".join(in_words(one) for one in schema[choice])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"array of {in_words(schema['items'])}"
    return str(kind)


def read_as(value: Any, schema: Schema) -> Any:
    """A value as its schema wants it, where a model wrote it in another form and nothing is lost by reading it.

    Texts are read as JSON where the schema wants no text, so ``"5"``, ``"True"`` and ``'["a"]'`` become a number, a
    boolean and a list; ``"null"`` becomes null where null may be. What may be a text stays as it was written. What
    cannot be read stays too: whoever validates says so.

    Args:
        value: what JSON can hold.
        schema: a schema as `plain` makes it.
    """
    if not isinstance(value, (str, dict, list, float)):
        return value
    if isinstance(value, str):
        if value == "null" and _allows(schema, "null"):
            return None
        if _may_be_text(schema):
            return value
        value = _read_text(value, schema)
    if isinstance(value, float) and value.is_integer() and _allows(schema, "integer") and not _allows(schema, "number"):
        return int(value)
    for choice in _CHOICES:
        if choice not in schema:
            continue
        fitting = [one for one in schema[choice] if _allows(one, _kind(value))]
        if len(fitting) == 1:
            return read_as(value, fitting[0])
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
    except NotJSON:
        return text
    return text if isinstance(read, str) or end < len(written) else read


def _read_object(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    known = schema.get("properties", {})
    if known.keys() >= value.keys():
        return {name: read_as(one, known[name]) for name, one in value.items()}
    others = schema.get("additionalProperties")
    others = others if isinstance(others, Mapping) else {}
    return {name: read_as(one, known.get(name, others)) for name, one in value.items()}


def _read_array(value: list[Any], schema: Schema) -> list[Any]:
    first: Sequence[Any] = schema.get("prefixItems", ())
    rest = schema.get("items")
    rest = rest if isinstance(rest, Mapping) else {}
    return [read_as(one, first[place] if place < len(first) else rest) for place, one in enumerate(value)]


def _may_be_text(schema: Schema) -> bool:
    if "enum" in schema:
        return any(isinstance(one, str) for one in schema["enum"])
    if any(choice in schema for choice in _CHOICES):
        return any(_may_be_text(one) for choice in _CHOICES for one in schema.get(choice, ()))
    return "type" not in schema or _allows(schema, "string")


def _allows(schema: Schema, kind: str) -> bool:
    """Whether a schema names a type."""
    if any(choice in schema for choice in _CHOICES):
        return any(_allows(one, kind) for choice in _CHOICES for one in schema.get(choice, ()))
    named = schema.get("type")
    return kind in named if isinstance(named, list) else kind == named


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return kinds.get(type(value), "null")

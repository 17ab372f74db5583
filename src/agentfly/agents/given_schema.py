"""GivenSchema: the arguments of a tool that somebody else has described, as a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.json_schema import plain, read_as
from agentfly.agents.schema import Argument, ToolSchema
from agentfly.errors import PrerequisiteError, ToolDefinitionError
from agentfly.installation import install_command


class GivenSchema(ToolSchema):
    """Arguments as a JSON schema describes them. The function gets them all in one, as ``arguments``.

    What the model wrote in another form than the schema's is read as `ArgumentSchema` reads it. Names that the schema
    does not have are refused, unless it says that there may be others.

    Args:
        tool: name of the tool, for messages.
        schema: the schema of an object, of any draft.

    Raises:
        ToolDefinitionError: it is no schema of an object.
        PrerequisiteError: the package ``jsonschema`` is not installed.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        self.tool = tool
        self._given = dict(schema)
        self._validator = _validator(tool, self._given)
        simple = plain(self._given)
        self.json_schema = {"type": "object", "properties": simple.pop("properties", {}), **simple}
        self.arguments = tuple(self._arguments())
        self._closed = self.json_schema.get("additionalProperties") is None and "patternProperties" not in simple

    def __reduce__(self) -> tuple[Any, ...]:
        return GivenSchema, (self.tool, self._given)

    def validate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, read as the schema wants them, under the name ``arguments``."""
        try:
            read = read_as(dict(given), self.json_schema)
            problems = list(self._problems(read))
        except RecursionError:
            problems = ["the value is nested too deeply"]
        if problems:
            raise self.refusal(given, problems)
        return {"arguments": read}

    def _problems(self, read: Mapping[str, Any]) -> Iterator[str]:
        from referencing.exceptions import Unresolvable

        try:
            for error in self._validator.iter_errors(read):
                where = ".".join(map(str, error.absolute_path))
                yield excerpt(f"{where}: {error.message}" if where else error.message, ECHO_CHARS // 4)
        except Unresolvable:  # a part of the schema lies elsewhere: the server knows it and will say
            pass
        known = {argument.name for argument in self.arguments}
        for name in read if self._closed else ():
            if name not in known:
                yield f"{excerpt(name, ECHO_CHARS // 8)!r} is not among them"
        try:
            json.dumps(read, allow_nan=False)
        except ValueError:
            yield "numbers must be finite"

    def _arguments(self) -> Iterator[Argument]:
        required = self.json_schema.get("required", ())
        for name, schema in self.json_schema["properties"].items():
            shown = schema if isinstance(schema, Mapping) else {}
            description = " ".join(str(shown.get("description", "")).split())
            yield Argument(name, Any, description, name in required, shown.get("default"))


def _validator(tool: str, schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise PrerequisiteError(
            f"Tools described by a JSON schema need the package jsonschema ({error}): {install_command('mcp')}."
        ) from error
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {error.message}.") from error
    if schema.get("type", "object") != "object":
        raise ToolDefinitionError(
            f"The JSON schema of the tool {tool!r} describes {excerpt(json.dumps(schema['type']), ECHO_CHARS // 8)}, "
            "where the arguments of a call are an object."
        )
    return kind(schema)

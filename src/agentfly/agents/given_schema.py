"""GivenSchema: the arguments of a tool that somebody else has described, as a JSON schema."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.json_schema import plain, read_as
from agentfly.agents.schema import Argument, ToolSchema
from agentfly.errors import PrerequisiteError, ToolDefinitionError, say
from agentfly.installation import install_command

logger = logging.getLogger(__name__)

_SAYS_OF_OTHERS = frozenset(
    {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "if",
        "allOf",
        "anyOf",
        "oneOf",
    }
)
"""Keywords of an object's schema that may let names through that ``properties`` does not have."""


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

    def __init__(self, tool: str, schema: Mapping[str, Any] | bool) -> None:
        self.tool = tool
        self._given = _of_an_object(tool, schema)
        try:
            self._validator = _validator(tool, self._given)
            simple = plain(self._given)
        except RecursionError:
            raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is nested too deeply.") from None
        self.json_schema = {"properties": simple.pop("properties", {}), **simple, "type": "object"}
        self.arguments = tuple(self._arguments())
        self._closed = not _SAYS_OF_OTHERS.intersection(simple)

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
        try:
            for error in self._validator.iter_errors(read):
                where = ".".join(map(str, error.absolute_path))
                yield excerpt(f"{where}: {error.message}" if where else error.message, ECHO_CHARS // 4)
        except RecursionError:
            raise
        except Exception as error:  # a part that lies elsewhere, a pattern of another dialect: the server will judge
            logger.debug("Arguments of %r are not checked: %s", self.tool, say(error))
        known = {argument.name for argument in self.arguments}
        for name in read if self._closed else ():
            if name not in known:
                yield f"{excerpt(name, ECHO_CHARS // 8)!r} is not among them"
        try:
            json.dumps(read, allow_nan=False)
        except ValueError:
            yield "numbers must be finite"

    def _arguments(self) -> Iterator[Argument]:
        required = self.json_schema.get("required")
        required = required if isinstance(required, list) else []  # draft 3 has a boolean for each argument
        properties = self.json_schema["properties"]
        for name in required:
            properties.setdefault(name, {})  # what is wanted without being described
        for name, schema in properties.items():
            description = " ".join(str(schema.get("description", "")).split())
            yield Argument(name, Any, description, name in required, schema.get("default"))


def _of_an_object(tool: str, schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """The schema, where an object can fit it; ``true`` takes any."""
    if schema is True:
        return {"type": "object", "additionalProperties": True}
    if not isinstance(schema, Mapping):
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {schema!r:.100}.")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ToolDefinitionError(
            f"The JSON schema of the tool {tool!r} describes {excerpt(json.dumps(kind), ECHO_CHARS // 8)}, where the "
            "arguments of a call are an object."
        )
    return dict(schema)


def _validator(tool: str, schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema import Draft202012Validator, FormatChecker
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise PrerequisiteError(
            f"Tools described by a JSON schema need the package jsonschema ({error}): {install_command('mcp')}."
        ) from error
    named = isinstance(schema.get("$schema"), str)
    kind = validator_for(schema, default=Draft202012Validator) if named else Draft202012Validator
    try:
        kind.check_schema(schema, format_checker=FormatChecker(()))  # patterns may be of another dialect than Python's
    except SchemaError as error:
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {error.message}.") from error
    return kind(schema)

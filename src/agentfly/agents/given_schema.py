"""GivenSchema: the arguments of a tool that somebody else has described, as a JSON schema."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.json_schema import plain, read_as
from agentfly.agents.schema import Argument, ToolSchema
from agentfly.errors import PrerequisiteError, ToolDefinitionError, say
from agentfly.installation import install_command

logger = logging.getLogger(__name__)

MOST_WORK = 10_000
"""Keywords of a schema that are evaluated for one call; what is left then is for the server to judge."""

MOST_WORK_OF_A_SCHEMA = 1_000_000
"""The same for the check that it is a schema, which is made once."""

LONGEST_MATCHED = 10_000
"""Characters of the longest text that a pattern is tried on."""

_UNBOUNDED = ("patternProperties", "unevaluatedProperties", "unevaluatedItems")
"""Keywords whose evaluation runs patterns of the schema in Python's engine, or goes through subschemas uncounted."""

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

    The schema may be hostile. Nothing that it refers to is fetched, its patterns run in linear time, and a call costs a
    bounded amount of work. What cannot be checked within that is left to the server.

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
        self._work = _Work()
        try:
            self._validator = _validator(tool, self._given, self._work)
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
        self._work.left = MOST_WORK
        try:
            for error in self._validator.iter_errors(read):
                where = ".".join(map(str, error.absolute_path))
                yield excerpt(f"{where}: {error.message}" if where else error.message, ECHO_CHARS // 4)
        except RecursionError:
            raise
        except Exception as error:  # a part that lies elsewhere, too much work: the server will judge
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


class _Work:
    """How much of a schema may still be evaluated for a call."""

    left = MOST_WORK

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise _TooMuch("its check takes too many evaluations")


class _TooMuch(Exception):
    """The check of a call would take too long."""


Evaluate = Callable[[Any, Any, Any, Mapping[str, Any]], Iterator[Any] | None]


def _validator(tool: str, schema: Mapping[str, Any], work: _Work) -> Any:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import extend, validator_for
        from referencing import Registry
    except ImportError as error:
        raise PrerequisiteError(
            f"Tools described by a JSON schema need the package jsonschema ({error}): {install_command('mcp')}."
        ) from error
    named = isinstance(schema.get("$schema"), str)
    kind = validator_for(schema, default=Draft202012Validator) if named else Draft202012Validator
    known = {**kind.VALIDATORS, "pattern": _pattern, **dict.fromkeys(_UNBOUNDED, _unchecked)}
    bounded = extend(kind, {name: _counted(name, evaluate, work) for name, evaluate in known.items()})
    registry: Registry[Any] = Registry()  # an empty one: the default fetches files and URLs

    def evolve(self: Any, *, schema: Any, _resolver: Any = None) -> Any:
        return bounded(schema, registry=registry, _resolver=_resolver or self._resolver)

    bounded.evolve = evolve  # the default takes the validator of whatever "$schema" a part names
    work.left = MOST_WORK_OF_A_SCHEMA
    try:
        wrong = next(bounded(kind.META_SCHEMA, registry=registry).iter_errors(schema), None)
    except _TooMuch as error:
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is too large: {error}.") from None
    if wrong is not None:
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {wrong.message:.{ECHO_CHARS}}.")
    return bounded(schema, registry=registry)


def _counted(name: str, evaluate: Evaluate, work: _Work) -> Evaluate:
    """A keyword's evaluation that counts what it costs."""

    def counted(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        work.spend(1 + (len(value) // 10 if isinstance(value, (list, dict)) else 0))
        if name == "uniqueItems" and isinstance(instance, list):
            work.spend(len(instance) ** 2 // 100)  # each may be compared with each
        if name == "additionalProperties" and "patternProperties" in schema:
            return  # which names are additional depends on patterns
        yield from evaluate(validator, value, instance, schema) or ()

    return counted


def _unchecked(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    return iter(())


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    """Whether a text has a pattern in it, as far as an engine of linear time knows the pattern's dialect."""
    if not isinstance(instance, str) or len(instance) > LONGEST_MATCHED or (matcher := _matcher(pattern)) is None:
        return
    try:
        matcher.validate_python(instance)
    except ValueError:
        from jsonschema.exceptions import ValidationError

        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@functools.lru_cache(maxsize=1000)
def _matcher(pattern: str) -> SchemaValidator | None:
    """Tells whether a text has a pattern in it, in linear time; None for a pattern of another dialect."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None

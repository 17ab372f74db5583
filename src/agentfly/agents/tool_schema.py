"""Schemas of a tool's arguments, from type hints or a given JSON schema, and validation of the model's arguments."""

from __future__ import annotations

import copy
import functools
import json
import logging
import operator
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Union

import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic import create_model as create_pydantic_model
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError, SchemaValidator, core_schema, to_jsonable_python

from agentfly.core.errors import InvalidArguments, PrerequisiteError, ToolDefinitionError, describe_error
from agentfly.core.installation import install_command
from agentfly.core.json_schema import coerce_to_schema, describe_type, simplify_schema
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle

_MOST_PROBLEMS = 5  # of one call that an error lists


@dataclass(frozen=True)
class ToolArgument:
    """One argument that the model provides.

    Attributes:
        name: its name.
        annotation: its type.
        description: its description from the docstring; empty if there is none.
        required: whether it is required.
        default: its default if it is optional, shown to the model in the schema.
    """

    name: str
    annotation: Any
    description: str = ""
    required: bool = True
    default: Any = None


class ToolSchema(ABC):
    """The arguments that a tool expects.

    Attributes:
        tool: name of the tool, for messages.
        arguments: the arguments, in order.
        json_schema: their JSON schema, simple enough for chat templates.
    """

    tool: str
    arguments: tuple[ToolArgument, ...]
    json_schema: dict[str, Any]

    @abstractmethod
    def validate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the tool's function.

        Raises:
            InvalidArguments: a name is missing or unknown, or a value does not fit. The message says which one and what
                was expected, and repeats the given arguments, cut to about 800 characters.
        """

    def describe(self) -> str:
        """Describe the arguments briefly, for instance ``city (string), days (integer, optional)``."""
        return ", ".join(
            f"{argument.name} ({self.type_of(argument.name)}{'' if argument.required else ', optional'})"
            for argument in self.arguments
        )

    def type_of(self, name: str) -> str:
        """Return the type of an argument in JSON's terms."""
        return describe_type(self.json_schema["properties"][name])

    def refusal(self, given: Mapping[str, Any], problems: Sequence[str]) -> InvalidArguments:
        """Return the error for a call whose arguments do not fit."""
        shown = list(problems[:_MOST_PROBLEMS])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        expected = f"It takes: {self.describe()}." if self.arguments else "It takes no arguments."
        return InvalidArguments(
            f"The call of {self.tool!r} was not executed, because its arguments do not fit: {'; '.join(shown)}. "
            f"{expected} You gave: {truncate_middle(_echo(given), MAX_ECHO_CHARS)}"
        )


class ArgumentSchema(ToolSchema):
    """The arguments of a tool, with their JSON schema and their validation.

    A value of another form is converted to the declared type if that loses nothing: the texts ``"5"``, ``"True"``,
    ``'["a"]'`` and ``"null"`` become a number, a boolean, a list and null. A value is not converted if its type allows
    a
    string: ``"0123"``, and ``"none"`` of an enumeration. If null is allowed, too, the text ``null`` is read as null
    only in tool-call formats that write all values as texts.

    Args:
        tool: name of the tool, for messages.
        arguments: the arguments, in order.

    Raises:
        TypeError: a type has no JSON form; the message names the argument.
    """

    def __init__(self, tool: str, arguments: Sequence[ToolArgument]) -> None:
        self.tool = tool
        self.arguments = tuple(arguments)
        for argument in arguments:
            _model_of("check", [argument])  # so that the message can name the one that has no JSON form
        self._model = _model_of(tool, self.arguments)
        self._fields = [(argument.name, _field(number)) for number, argument in enumerate(self.arguments)]
        self._changeable = {one.name: one.default for one in arguments if not one.required and _can_change(one.default)}
        self.json_schema = _json_schema(self._model, self.arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArgumentSchema, (self.tool, self.arguments)  # a model made at run time does not pickle

    def validate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as values of the tool's types. Arguments that were not given are left out.

        A mutable default, such as a list, is copied for each call, because all rollouts would share it.

        Raises:
            InvalidArguments: a name is missing or unknown, or a value does not fit. The message says which one and what
                was expected, and repeats the given arguments, cut to about 800 characters.
        """
        try:
            model = self._model.model_validate(coerce_to_schema(dict(given), self.json_schema))
        except ValidationError as error:
            raise self.refusal(given, _problems(error)) from None
        except RecursionError:
            raise self.refusal(given, ["the value is nested too deeply"]) from None
        values = model.__dict__
        read = {name: values[field] for name, field in self._fields if field in model.model_fields_set}
        for name in self._changeable.keys() - read.keys():
            read[name] = copy.deepcopy(self._changeable[name])
        return read


def _can_change(default: Any) -> bool:
    """Return whether a default value is mutable."""
    return isinstance(default, list | dict | set | bytearray | BaseModel) or is_dataclass(default)


def _field(number: int) -> str:
    """Return the numbered name of a model's field, so that no argument's name clashes with one of pydantic's."""
    return f"argument_{number}"


def _model_of(name: str, arguments: Sequence[ToolArgument]) -> type[BaseModel]:
    config = ConfigDict(
        extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=(), title=name
    )
    fields: dict[str, Any] = {_field(number): _typed(argument) for number, argument in enumerate(arguments)}
    try:
        model: type[BaseModel] = create_pydantic_model(name, __config__=config, **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0].partition(". Set `arbitrary_types_allowed")[0].rstrip(".")
        raise TypeError(f"{', '.join(argument.name for argument in arguments)}: {reason}") from error
    return model


def _typed(argument: ToolArgument) -> tuple[Any, Any]:
    annotation = _read_whole(_with_typed_dicts(argument.annotation))
    default: Any = ... if argument.required else None
    if argument.description:
        return annotation, Field(default, alias=argument.name, description=argument.description)
    return annotation, Field(default, alias=argument.name)


def _with_typed_dicts(annotation: Any) -> Any:
    """Replace ``typing.TypedDict`` classes in a type, because pydantic cannot read them before Python 3.12."""
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation):
        fields = typing.get_type_hints(annotation, include_extras=True)
        remade = {name: _with_typed_dicts(hint) for name, hint in fields.items()}
        return typing_extensions.TypedDict(annotation.__name__, remade, total=annotation.__total__)  # type: ignore[operator]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_with_typed_dicts(inner[0]), *annotation.__metadata__)]
    changed = tuple(_with_typed_dicts(one) for one in inner)
    if changed == inner:
        return annotation
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, changed)
    return origin[changed]


def _read_whole(annotation: Any) -> Any:
    """Return a type with lists for iterables. pydantic would check an iterable's items only when the tool reads it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if Iterable in (annotation, origin):
        return list[inner[0]] if inner else list  # type: ignore[valid-type]
    if origin is Annotated:
        return Annotated[(_read_whole(inner[0]), *annotation.__metadata__)]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_read_whole, inner))
    return annotation


def _json_schema(model: type[BaseModel], arguments: Sequence[ToolArgument]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    for argument in arguments:
        shown = schema["properties"][argument.name]
        shown.pop("default", None)
        if not argument.required:
            try:
                default = to_jsonable_python(argument.default)
                json.dumps(default, allow_nan=False)
                shown["default"] = default
            except ValueError:  # JSON cannot show it: it is left out, since the model need not know it
                continue
    simple = simplify_schema(schema)
    return {"type": "object", "properties": simple.pop("properties", {}), **simple}


def _problems(error: ValidationError) -> list[str]:
    return list(_each_problem(error))


def _each_problem(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            yield f"{where} is missing"
        elif problem["type"] == "extra_forbidden":
            yield f"{truncate_middle(where, MAX_ECHO_CHARS // 8)!r} is not among them"
        else:
            yield f"{truncate_middle(where, MAX_ECHO_CHARS // 8)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _echo(given: Mapping[str, Any]) -> str:
    try:
        return json.dumps(given, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "something nested too deeply to show"


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


class JSONSchemaArguments(ToolSchema):
    """Arguments described by a JSON schema. The function receives all of them in one argument, ``arguments``.

    Values of another form are converted as by `ArgumentSchema`. Names that the schema does not have are rejected,
    unless it allows further ones.

    The schema may be hostile. References are never fetched, patterns run in linear time, and the work per call is
    bounded. Checks that would exceed the bound are left to the server.

    Args:
        tool: name of the tool, for messages.
        schema: the schema of an object, of any draft.

    Raises:
        ToolDefinitionError: it is not the schema of an object.
        PrerequisiteError: the package ``jsonschema`` is not installed.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any] | bool) -> None:
        self.tool = tool
        self._given = _of_an_object(tool, schema)
        self._work = _Work()
        try:
            self._validator = _validator(tool, self._given, self._work)
            simple = simplify_schema(self._given)
        except RecursionError:
            raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is nested too deeply.") from None
        self.json_schema = {"properties": simple.pop("properties", {}), **simple, "type": "object"}
        self.arguments = tuple(self._arguments())
        self._closed = not _SAYS_OF_OTHERS.intersection(simple)

    def __reduce__(self) -> tuple[Any, ...]:
        return JSONSchemaArguments, (self.tool, self._given)

    def validate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, converted to the schema's types, under the name ``arguments``."""
        try:
            read = coerce_to_schema(dict(given), self.json_schema)
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
                yield truncate_middle(f"{where}: {error.message}" if where else error.message, MAX_ECHO_CHARS // 4)
        except RecursionError:
            raise
        except Exception as error:  # a part that lies elsewhere, too much work: the server will judge
            logger.debug("Arguments of %r are not checked: %s", self.tool, describe_error(error))
        known = {argument.name for argument in self.arguments}
        for name in read if self._closed else ():
            if name not in known:
                yield f"{truncate_middle(name, MAX_ECHO_CHARS // 8)!r} is not among them"
        try:
            json.dumps(read, allow_nan=False)
        except ValueError:
            yield "numbers must be finite"

    def _arguments(self) -> Iterator[ToolArgument]:
        required = self.json_schema.get("required")
        required = required if isinstance(required, list) else []  # draft 3 has a boolean for each argument
        properties = self.json_schema["properties"]
        for name in required:
            properties.setdefault(name, {})  # what is wanted without being described
        for name, schema in properties.items():
            description = " ".join(str(schema.get("description", "")).split())
            yield ToolArgument(name, Any, description, name in required, schema.get("default"))


def _of_an_object(tool: str, schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """Return the schema if an object can fit it; ``true`` accepts any."""
    if schema is True:
        return {"type": "object", "additionalProperties": True}
    if not isinstance(schema, Mapping):
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {schema!r:.100}.")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ToolDefinitionError(
            f"The JSON schema of the tool {tool!r} describes "
            f"{truncate_middle(json.dumps(kind), MAX_ECHO_CHARS // 8)}, where the arguments of a call are an object."
        )
    return dict(schema)


class _Work:
    """Remaining schema evaluations for one call."""

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
        raise ToolDefinitionError(f"The JSON schema of the tool {tool!r} is none: {wrong.message:.{MAX_ECHO_CHARS}}.")
    return bounded(schema, registry=registry)


def _counted(name: str, evaluate: Evaluate, work: _Work) -> Evaluate:
    """Return a keyword's evaluation that counts its cost."""

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
    """Check a text against a pattern, as far as the linear-time engine supports the pattern's dialect."""
    if not isinstance(instance, str) or len(instance) > LONGEST_MATCHED or (matcher := _matcher(pattern)) is None:
        return
    try:
        matcher.validate_python(instance)
    except ValueError:
        from jsonschema.exceptions import ValidationError

        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@functools.lru_cache(maxsize=1000)
def _matcher(pattern: str) -> SchemaValidator | None:
    """Return a linear-time search for a pattern; None for a pattern of another dialect."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None

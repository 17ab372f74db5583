"""ArgumentSchema: what a tool wants of the model, as a JSON schema, and the check of what the model gave."""

from __future__ import annotations

import copy
import functools
import json
import operator
import sys
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Union

import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic import create_model as create_pydantic_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.json_schema import in_words, plain, read_as
from agentfly.errors import InvalidArguments

_MOST_PROBLEMS = 5  # of one call that an error lists


@dataclass(frozen=True)
class Argument:
    """One argument that the model gives.

    Attributes:
        name: its name.
        annotation: its type.
        description: what the docstring says of it; empty if nothing.
        required: whether it must be given.
        default: its default if it need not be given, for the schema to tell the model.
    """

    name: str
    annotation: Any
    description: str = ""
    required: bool = True
    default: Any = None


class ToolSchema(ABC):
    """What a tool wants of the model.

    Attributes:
        tool: name of the tool, for messages.
        arguments: the arguments, in order.
        json_schema: their JSON schema, simple enough for chat templates.
    """

    tool: str
    arguments: tuple[Argument, ...]
    json_schema: dict[str, Any]

    @abstractmethod
    def validate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the tool's function is called with, by name.

        Raises:
            InvalidArguments: a name is missing or too many, or a value does not fit. The message says which, and what
                was expected, and repeats what was given, cut to about 800 characters.
        """

    def describe(self) -> str:
        """The arguments in a few words, for instance ``city (string), days (integer, optional)``."""
        return ", ".join(
            f"{argument.name} ({self.type_of(argument.name)}{'' if argument.required else ', optional'})"
            for argument in self.arguments
        )

    def type_of(self, name: str) -> str:
        """The type of an argument in JSON's words."""
        return in_words(self.json_schema["properties"][name])

    def refusal(self, given: Mapping[str, Any], problems: Sequence[str]) -> InvalidArguments:
        """The error of a call whose arguments do not fit."""
        shown = list(problems[:_MOST_PROBLEMS])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        expected = f"It takes: {self.describe()}." if self.arguments else "It takes no arguments."
        return InvalidArguments(
            f"The call of {self.tool!r} was not executed, because its arguments do not fit: {'; '.join(shown)}. "
            f"{expected} You gave: {excerpt(_echo(given), ECHO_CHARS)}"
        )


class ArgumentSchema(ToolSchema):
    """The arguments of a tool: their JSON schema, and their validation.

    A value that the model wrote in another form than the type's is read as the type where that loses nothing: the
    texts ``"5"``, ``"True"``, ``'["a"]'`` and ``"null"`` as a number, a boolean, a list and null. What may be a string
    by its type stays as it was written: ``"0123"``, and ``"none"`` of an enumeration. Only where a tool-call format
    writes all values as texts is ``null`` read as null if that is allowed, too.

    Args:
        tool: name of the tool, for messages.
        arguments: the arguments, in order.

    Raises:
        TypeError: a type has no JSON form; the message names the argument.
    """

    def __init__(self, tool: str, arguments: Sequence[Argument]) -> None:
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
        """The arguments as the tool's types, those that were not given left out.

        Of a default that can be changed, such as a list, each call has a copy: it would be shared by all rollouts.

        Raises:
            InvalidArguments: a name is missing or too many, or a value does not fit. The message says which, and what
                was expected, and repeats what was given, cut to about 800 characters.
        """
        try:
            model = self._model.model_validate(read_as(dict(given), self.json_schema))
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
    """Whether a tool could write into a default."""
    return isinstance(default, list | dict | set | bytearray | BaseModel) or is_dataclass(default)


def _field(number: int) -> str:
    """Name of a model's field: numbered, so that no argument's name can clash with a name of pydantic's."""
    return f"argument_{number}"


def _model_of(name: str, arguments: Sequence[Argument]) -> type[BaseModel]:
    config = ConfigDict(
        extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=(), title=name
    )
    fields: dict[str, Any] = {_field(number): _typed(argument) for number, argument in enumerate(arguments)}
    try:
        model: type[BaseModel] = create_pydantic_model(name, __config__=config, **fields)
        model.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise TypeError(f"{', '.join(argument.name for argument in arguments)}: {reason}") from error
    return model


def _typed(argument: Argument) -> tuple[Any, Any]:
    annotation = _read_whole(_with_typed_dicts(argument.annotation))
    default: Any = ... if argument.required else None
    if argument.description:
        return annotation, Field(default, alias=argument.name, description=argument.description)
    return annotation, Field(default, alias=argument.name)


def _with_typed_dicts(annotation: Any) -> Any:
    """A type whose ``typing.TypedDict`` classes are remade, because before Python 3.12 pydantic does not read them."""
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
    """A type in which any iterable is a list: pydantic would check what it holds only while the tool reads it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if Iterable in (annotation, origin):
        return list[inner[0]] if inner else list  # type: ignore[valid-type]
    if origin is Annotated:
        return Annotated[(_read_whole(inner[0]), *annotation.__metadata__)]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_read_whole, inner))
    return annotation


def _json_schema(model: type[BaseModel], arguments: Sequence[Argument]) -> dict[str, Any]:
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
    simple = plain(schema)
    return {"type": "object", "properties": simple.pop("properties", {}), **simple}


def _problems(error: ValidationError) -> list[str]:
    return list(_each_problem(error))


def _each_problem(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            yield f"{where} is missing"
        elif problem["type"] == "extra_forbidden":
            yield f"{excerpt(where, ECHO_CHARS // 8)!r} is not among them"
        else:
            yield f"{excerpt(where, ECHO_CHARS // 8)}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _echo(given: Mapping[str, Any]) -> str:
    try:
        return json.dumps(given, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "something nested too deeply to show"

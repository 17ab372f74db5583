"""Definition: what a function's signature and docstring say of the tool that it can be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docstring_parser

from agentfly.agents.needs import Needs, checked_needs
from agentfly.agents.parameters import MISSING, Parameter, Source, read_parameters
from agentfly.agents.schema import Argument, ArgumentSchema
from agentfly.durations import is_duration
from agentfly.errors import ToolDefinitionError

MAX_OUTPUT_TOKENS = 4_000
"""The longest observation that a tool gives unless it says otherwise, in tokens."""

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What a tool may be called."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is written in the brackets of ``@tool(…)``; see there."""

    name: str | None = None
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    resources: Needs = ()

    def check(self, name: str) -> None:
        """See that a tool can be like that.

        Raises:
            ToolDefinitionError: a setting has a value that cannot be.
        """
        if self.timeout_s is not None and not is_duration(self.timeout_s):
            raise ToolDefinitionError(
                f"The tool {name!r} has timeout_s={self.timeout_s!r}; it must be a finite number of seconds above 0, "
                "without quotes, or None."
            )
        for setting, least in (("max_output_tokens", 1), ("retries", 0)):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ToolDefinitionError(
                    f"The tool {name!r} has {setting}={value!r}; it must be a whole number of at least {least}."
                )
        try:
            checked_needs(self.resources)
        except ValueError as error:
            raise ToolDefinitionError(f"{name!r} cannot become a tool: {error}") from None


@dataclass(frozen=True)
class Definition:
    """What a function says of the tool that it can be.

    Attributes:
        description: what the model is told that it does: the docstring without its sections.
        schema: the arguments that the model gives.
        elsewhere: the parameters that the context and the task fill in.
    """

    description: str
    schema: ArgumentSchema
    elsewhere: tuple[Parameter, ...]


def define(function: Callable[..., Any], name: str, names: Mapping[str, Any], *, method: bool = False) -> Definition:
    """Read a function.

    Args:
        function: the function.
        name: the tool's name, for messages.
        names: names that are local to the place of definition, which annotations written as text may use.
        method: whether its first parameter is the instance.

    Raises:
        ToolDefinitionError: it cannot become a tool, for instance because it has no docstring.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolDefinitionError(f"The tool {name!r} yields, but an observation is one value: return it instead.")
    require_name(name)
    described = docstring_parser.parse("\n" + (inspect.getdoc(function) or ""))  # sections begin after a line break
    description = (described.description or "").strip()
    if not description:
        raise ToolDefinitionError(
            f"The tool {name!r} has no docstring, so the model could not know what it does. Write one that says it in "
            "a sentence, with a line for each argument under 'Args:'."
        )
    try:
        parameters = read_parameters(function, names)[1 if method else 0 :]
    except ValueError as error:
        raise ToolDefinitionError(f"{name!r} cannot become a tool: {error}") from None
    documented = {param.arg_name: " ".join((param.description or "").split()) for param in described.params}
    schema = _schema(name, [one for one in parameters if one.source is Source.CALLER], documented)
    return Definition(description, schema, tuple(one for one in parameters if one.source is not Source.CALLER))


def require_name(name: str) -> None:
    """See that a model can call a tool by this name.

    Raises:
        ToolDefinitionError: it cannot.
    """
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ToolDefinitionError(
            f"{name!r} is no name that a model can call. Give one of letters, digits, '_' and '-', at most 64 of them: "
            "@tool(name=…)."
        )


def _schema(name: str, parameters: Sequence[Parameter], documented: Mapping[str, str]) -> ArgumentSchema:
    arguments = []
    for parameter in parameters:
        if parameter.annotation is MISSING:
            raise ToolDefinitionError(
                f"The parameter {parameter.name!r} of the tool {name!r} has no type hint, so the model could not know "
                f"what to give. Write for instance '{parameter.name}: str'."
            )
        if isinstance(parameter.annotation, str):
            raise ToolDefinitionError(
                f"The type hint '{parameter.annotation}' of parameter {parameter.name!r} of the tool {name!r} cannot "
                "be resolved. Import what it names at run time too, not only under TYPE_CHECKING, and above the tool."
            )
        default = None if parameter.required else parameter.default
        description = documented.get(parameter.name, "")
        arguments.append(Argument(parameter.name, parameter.annotation, description, parameter.required, default))
    try:
        return ArgumentSchema(name, arguments)
    except TypeError as error:
        raise ToolDefinitionError(
            f"The model cannot give a value of the type that the tool {name!r} wants for {error}. Use types that JSON "
            "can hold, or get the value from the context or the task (Annotated[T, FromTask()])."
        ) from error

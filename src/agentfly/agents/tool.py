"""Definition: what a function's signature and docstring say of the tool that it can be.

Tool: something that the model can call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, ClassVar, NoReturn, Protocol

import docstring_parser

from agentfly.agents.invocation import FunctionFailed, FunctionTimeout, ThreadCaller, call_user_function
from agentfly.agents.tool_result import ToolResult, to_tool_result
from agentfly.agents.tool_schema import ArgumentSchema, ToolArgument, ToolSchema
from agentfly.agents.transient_errors import find_transient_error
from agentfly.agents.user_function import (
    MISSING,
    DeclaredResources,
    Parameter,
    ParameterSource,
    UserFunction,
    read_parameters,
    task_field,
    validate_resources,
)
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AgentFlyError,
    ToolCrashed,
    ToolDefinitionError,
    ToolError,
    ToolTimeout,
    ToolUnavailable,
    UsageError,
    describe_error,
    error_message,
)
from agentfly.core.messages import TOOL_NAME
from agentfly.core.numbers import is_duration
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.core.trajectory import Failure
from agentfly.core.truncation import MAX_ECHO_CHARS, Truncate, truncate_by_characters, truncate_middle

MAX_OUTPUT_TOKENS = 4_000
"""The longest observation that a tool gives unless it says otherwise, in tokens."""

"""What a tool may be called."""


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """What is written in the brackets of ``@tool(…)``; see there."""

    name: str | None = None
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    resources: DeclaredResources = ()

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
            validate_resources(self.resources)
        except ValueError as error:
            raise ToolDefinitionError(f"{name!r} cannot become a tool: {error}") from None


@dataclass(frozen=True)
class FunctionDescription:
    """What a function says of the tool that it can be.

    Attributes:
        description: what the model is told that it does: the docstring without its sections.
        schema: the arguments that the model gives.
        injected_parameters: the parameters that the context and the task fill in.
    """

    description: str
    schema: ArgumentSchema
    injected_parameters: tuple[Parameter, ...]


def describe_function(
    function: Callable[..., Any], name: str, names: Mapping[str, Any], *, method: bool = False
) -> FunctionDescription:
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
    schema = _schema(name, [one for one in parameters if one.source is ParameterSource.MODEL_OR_ROLLOUT], documented)
    return FunctionDescription(
        description, schema, tuple(one for one in parameters if one.source is not ParameterSource.MODEL_OR_ROLLOUT)
    )


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
        arguments.append(ToolArgument(parameter.name, parameter.annotation, description, parameter.required, default))
    try:
        return ArgumentSchema(name, arguments)
    except TypeError as error:
        raise ToolDefinitionError(
            f"The model cannot give a value of the type that the tool {name!r} wants for {error}. Use types that JSON "
            "can hold, or get the value from the context or the task (Annotated[T, FromTask()])."
        ) from error


logger = logging.getLogger(__name__)


class ToolInstanceProvider(Protocol):
    """Where the instance lives whose method a tool is."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What the instance is made with: the context, and fields of the task."""
        ...

    async def instance(self, context: Context) -> tuple[object, ThreadCaller]:
        """The rollout's instance, and what calls its sync methods."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Tool(UserFunction):
    """Something that the model can call. Made by `@tool`; still callable as the function it was made from.

    Attributes:
        function: the function.
        name: what the model calls it.
        description: what the model is told that it does: the docstring without its sections.
        schema: the arguments that the model gives.
        injected_parameters: the parameters that the context and the task fill in.
        timeout_s: seconds that a call may take, waiting for resources not counted; None for any time.
        max_output_tokens: an observation longer than this keeps its head and tail only, and says so.
        retries: how often a call is made again that the machine or the network made fail.
        instance_provider: gives the instance whose method the function is; None for a function of its own.
    """

    description: str
    schema: ToolSchema
    injected_parameters: tuple[Parameter, ...] = ()
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    instance_provider: ToolInstanceProvider | None = None
    _reported_locations: set[str] = field(
        default_factory=set, init=False
    )  # the places of crashes that the author was told of

    _kind: ClassVar[str] = "tool"
    _mistake: ClassVar[type[UsageError]] = ToolDefinitionError

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments that the model gives."""
        return self.schema.json_schema

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates and model APIs want it described."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The fields that it needs each task to have: what it, or its instance, asks for and has no default for."""
        own = [one for one in self.injected_parameters if one.source is ParameterSource.TASK_FIELD]
        of_home = (
            []
            if self.instance_provider is None
            else [one for one in self.instance_provider.parameters if one.source is not ParameterSource.CONTEXT]
        )
        return tuple(one.name for one in (*own, *of_home) if one.required)

    def __repr__(self) -> str:
        return f"<tool {self.name}({', '.join(argument.name for argument in self.schema.arguments)})>"

    async def call(
        self, arguments: Mapping[str, Any], context: Context, *, cut: Truncate = truncate_by_characters
    ) -> ToolResult:
        """Call the tool on behalf of a rollout, with the model's arguments.

        A sync function runs on a thread, so that it never holds up other rollouts.

        Args:
            arguments: what the model gave.
            context: the rollout's context for this call.
            cut: cuts what is longer than ``max_output_tokens``: a `TokenCutter` of the policy's tokenizer.

        Raises:
            InvalidArguments: the arguments do not fit the schema.
            ToolTimeout: the call took longer than ``timeout_s``.
            ToolError: the tool says that the call did not work, or `ToolCrashed`: its code failed with an exception
                of another kind. The message of each of these is what the model should be told.
            ToolUnavailable: the tool's code failed because of the machine or the network (see `find_transient_error`).
            AgentFlyError: anything else that the model is not to blame for: a resource that could not be had, a task
                that lacks a field, a definition that is wrong.
        """
        result = await self._call(arguments, context, cut)
        told = cut(result.observation, self.max_output_tokens)
        return result if told == result.observation else replace(result, observation=told)

    async def _call(self, arguments: Mapping[str, Any], context: Context, cut: Truncate) -> ToolResult:
        """What the function returns, in full. What it raises is cut."""
        given = self.schema.validate(arguments)
        for parameter in self.injected_parameters:
            given[parameter.name] = self._inject(parameter, context)
        function, caller = await self._callable(context)
        try:
            value = await call_user_function(
                function, given, timeout_s=self.timeout_s, context=context, retries=self.retries, caller=caller
            )
        except FunctionTimeout:
            raise ToolTimeout(f"The call of {self.name!r} was stopped after {self.timeout_s:g} s.") from None
        except FunctionFailed as failed:
            self._raise_failure(failed, cut)
        try:
            return to_tool_result(self.name, value, self._reported_locations)
        except AgentFlyError:
            raise
        except Exception as error:  # of the value's own code, when it is asked what it reads as
            self._raise_failure(FunctionFailed(error), cut)

    async def _callable(self, context: Context) -> tuple[Callable[..., Any], ThreadCaller]:
        if self.instance_provider is None:
            return self.function, THREAD_POOL
        instance, caller = await self.instance_provider.instance(context)
        return MethodType(self.function, instance), caller

    def _inject(self, parameter: Parameter, context: Context) -> Any:
        if parameter.source is ParameterSource.CONTEXT:
            return context
        try:
            return task_field(parameter.name, context, parameter.default)
        except KeyError as error:
            raise ToolDefinitionError(
                f"The tool {self.name!r} wants a field of the task, but {error.args[0]}. Rename the parameter, give it "
                "a default, or add the field to the tasks."
            ) from None

    def _raise_failure(self, failed: FunctionFailed, cut: Truncate) -> NoReturn:
        error = failed.error
        if isinstance(error, ToolError):
            said = error_message(error)
            if (told := cut(said, self.max_output_tokens)) != said:
                raise ToolError(told) from error
        if isinstance(error, AgentFlyError):
            raise error from error.__cause__
        message = truncate_middle(describe_error(error), MAX_ECHO_CHARS)
        outage = find_transient_error(error)
        if outage is None:
            self._log_crash_once(error, message)
            raise ToolCrashed(message) from error
        behind = (
            ""
            if outage is error
            else f" (because of {type(outage).__name__}: {truncate_middle(error_message(outage), MAX_ECHO_CHARS)})"
        )
        raise ToolUnavailable(
            f"The tool {self.name!r} failed with {message}{behind}. The machine or the network is to blame for that, "
            "so the rollout gets no reward: see that what the tool uses is there. If the model can cause it by what it "
            "asks for, catch the exception in the tool and raise agentfly.ToolError, which the model is told."
        ) from error

    def _log_crash_once(self, error: BaseException, message: str) -> None:
        """Log a crash, once for each place: the model may have caused it, but as likely it is a mistake in the tool."""
        place = Failure.of(error).place
        if place not in self._reported_locations:
            self._reported_locations.add(place)
            logger.warning(
                "The tool %r crashed with %s, at %s. The model is told and the rollout goes on; this place is not "
                "reported again. If the model can cause it, raise agentfly.ToolError with what it should know.",
                self.name,
                message,
                place or "an unknown place",
            )

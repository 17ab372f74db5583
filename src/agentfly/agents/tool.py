"""Tool: a function that the model can call, and its description read from signature and docstring."""

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
"""Default maximum length of an observation, in tokens."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """The arguments of ``@tool(…)``; see there."""

    name: str | None = None
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    resources: DeclaredResources = ()

    def check(self, name: str) -> None:
        """Validate the settings.

        Raises:
            ToolDefinitionError: a setting has an invalid value.
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
    """The description of a tool, read from its function.

    Attributes:
        description: the docstring without its sections, shown to the model.
        schema: the arguments that the model gives.
        injected_parameters: the parameters filled in from the context and the task.
    """

    description: str
    schema: ArgumentSchema
    injected_parameters: tuple[Parameter, ...]


def describe_function(
    function: Callable[..., Any], name: str, names: Mapping[str, Any], *, method: bool = False
) -> FunctionDescription:
    """Read a tool's description from its function.

    Args:
        function: the function.
        name: the tool's name, for messages.
        names: local names at the definition, which annotations written as text may use.
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
    """Raise unless a tool may have this name.

    Raises:
        ToolDefinitionError: the name is not valid.
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


class ToolInstanceProvider(Protocol):
    """Provides the instance of a tool that is a method."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The constructor's parameters: the context, and fields of the task."""
        ...

    async def instance(self, context: Context) -> tuple[object, ThreadCaller]:
        """Return the rollout's instance, and the caller for its sync methods."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Tool(UserFunction):
    """A function that the model can call. Made by `@tool`; still callable as the function it was made from.

    Attributes:
        function: the function.
        name: the name by which the model calls it.
        description: the docstring without its sections, shown to the model.
        schema: the arguments that the model gives.
        injected_parameters: the parameters filled in from the context and the task.
        timeout_s: time limit of a call in seconds, without waiting for resources; None for no limit.
        max_output_tokens: a longer observation is truncated to its head and tail, with a note.
        retries: number of retries after failures of the machine or the network.
        instance_provider: provides the instance if the function is a method; None otherwise.
    """

    description: str
    schema: ToolSchema
    injected_parameters: tuple[Parameter, ...] = ()
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    instance_provider: ToolInstanceProvider | None = None
    _reported_locations: set[str] = field(default_factory=set, init=False)  # crash locations logged so far

    _kind: ClassVar[str] = "tool"
    _mistake: ClassVar[type[UsageError]] = ToolDefinitionError

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments that the model gives."""
        return self.schema.json_schema

    @property
    def definition(self) -> dict[str, Any]:
        """The tool's definition for chat templates and model APIs."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The task fields that the tool, or the constructor of its instance, requires."""
        own = [one for one in self.injected_parameters if one.source is ParameterSource.TASK_FIELD]
        constructor = () if self.instance_provider is None else self.instance_provider.parameters
        of_instance = [one for one in constructor if one.source is not ParameterSource.CONTEXT]
        return tuple(one.name for one in (*own, *of_instance) if one.required)

    def __repr__(self) -> str:
        return f"<tool {self.name}({', '.join(argument.name for argument in self.schema.arguments)})>"

    async def call(
        self, arguments: Mapping[str, Any], context: Context, *, truncate: Truncate = truncate_by_characters
    ) -> ToolResult:
        """Call the tool on behalf of a rollout, with the model's arguments.

        A sync function runs on a thread, so that it does not block other rollouts.

        Args:
            arguments: the arguments that the model gave.
            context: the rollout's context for this call.
            truncate: truncates texts longer than ``max_output_tokens``: a `TokenTruncator` of the policy's tokenizer.

        Raises:
            InvalidArguments: the arguments do not fit the schema.
            ToolTimeout: the call took longer than ``timeout_s``.
            ToolError: the tool raised it, or its code crashed with another exception (`ToolCrashed`). The message is
                meant for the model.
            ToolUnavailable: the tool's code failed because of the machine or the network (see `find_transient_error`).
            AgentFlyError: any other failure that the model did not cause: an unavailable resource, a task without a
                required field, a wrong definition.
        """
        result = await self._call(arguments, context, truncate)
        observation = truncate(result.observation, self.max_output_tokens)
        return result if observation == result.observation else replace(result, observation=observation)

    async def _call(self, arguments: Mapping[str, Any], context: Context, truncate: Truncate) -> ToolResult:
        """Return the function's result in full. Messages of its errors are truncated."""
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
            self._raise_failure(failed, truncate)
        try:
            return to_tool_result(self.name, value, self._reported_locations)
        except AgentFlyError:
            raise
        except Exception as error:  # raised by the value's own code while it is converted to text
            self._raise_failure(FunctionFailed(error), truncate)

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

    def _raise_failure(self, failed: FunctionFailed, truncate: Truncate) -> NoReturn:
        error = failed.error
        if isinstance(error, ToolError):
            message = error_message(error)
            if (truncated := truncate(message, self.max_output_tokens)) != message:
                raise ToolError(truncated) from error
        if isinstance(error, AgentFlyError):
            raise error from error.__cause__
        message = truncate_middle(describe_error(error), MAX_ECHO_CHARS)
        transient = find_transient_error(error)
        if transient is None:
            self._log_crash_once(error, message)
            raise ToolCrashed(message) from error
        cause = ""
        if transient is not error:
            reason = truncate_middle(error_message(transient), MAX_ECHO_CHARS)
            cause = f" (because of {type(transient).__name__}: {reason})"
        raise ToolUnavailable(
            f"The tool {self.name!r} failed with {message}{cause}. This is a failure of the machine or the network, "
            "so the rollout gets no reward. Check that everything the tool uses is available. If the model can cause "
            "it by its request, catch the exception in the tool and raise agentfly.ToolError, which the model reads."
        ) from error

    def _log_crash_once(self, error: BaseException, message: str) -> None:
        """Log a crash once per location. The model may have caused it, or it is a bug in the tool."""
        location = Failure.of(error).location
        if location not in self._reported_locations:
            self._reported_locations.add(location)
            logger.warning(
                "The tool %r crashed with %s, at %s. The error is shown to the model and the rollout continues; this "
                "location is not reported again. If the model can cause it, raise agentfly.ToolError with a message.",
                self.name,
                message,
                location or "an unknown location",
            )

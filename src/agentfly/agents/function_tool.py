"""Tool: something that the model can call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, ClassVar, NoReturn, Protocol

from agentfly.agents.definition import MAX_OUTPUT_TOKENS
from agentfly.agents.excerpt import ECHO_CHARS, Cut, cut_by_characters, excerpt
from agentfly.agents.function import UserFunction
from agentfly.agents.invocation import Caller, FunctionFailed, Overrun, invoke
from agentfly.agents.outage import outage_in
from agentfly.agents.parameters import Parameter, Source, field_of_task
from agentfly.agents.schema import ToolSchema
from agentfly.agents.tool_result import ToolResult, as_result
from agentfly.contexts.context import Context
from agentfly.errors import (
    AgentFlyError,
    ToolCrashed,
    ToolDefinitionError,
    ToolError,
    ToolTimeout,
    ToolUnavailable,
    UsageError,
    message_of,
    say,
)
from agentfly.threads.pool import THREADS
from agentfly.trajectory import Failure

logger = logging.getLogger(__name__)


class Home(Protocol):
    """Where the instance lives whose method a tool is."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What the instance is made with: the context, and fields of the task."""
        ...

    async def instance(self, context: Context) -> tuple[object, Caller]:
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
        parameters_from_elsewhere: the parameters that the context and the task fill in.
        timeout_s: seconds that a call may take, waiting for resources not counted; None for any time.
        max_output_tokens: an observation longer than this keeps its head and tail only, and says so.
        retries: how often a call is made again that the machine or the network made fail.
        home: gives the instance whose method the function is; None for a function of its own.
    """

    description: str
    schema: ToolSchema
    parameters_from_elsewhere: tuple[Parameter, ...] = ()
    timeout_s: float | None = None
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    retries: int = 0
    home: Home | None = None
    _told: set[str] = field(default_factory=set, init=False)  # the places of crashes that the author was told of

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
        own = [one for one in self.parameters_from_elsewhere if one.source is Source.TASK_FIELD]
        of_home = [] if self.home is None else [one for one in self.home.parameters if one.source is not Source.CONTEXT]
        return tuple(one.name for one in (*own, *of_home) if one.required)

    def __repr__(self) -> str:
        return f"<tool {self.name}({', '.join(argument.name for argument in self.schema.arguments)})>"

    async def call(self, arguments: Mapping[str, Any], context: Context, *, cut: Cut = cut_by_characters) -> ToolResult:
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
            ToolUnavailable: the tool's code failed because of the machine or the network (see `outage_in`).
            AgentFlyError: anything else that the model is not to blame for: a resource that could not be had, a task
                that lacks a field, a definition that is wrong.
        """
        result = await self._call(arguments, context, cut)
        told = cut(result.observation, self.max_output_tokens)
        return result if told == result.observation else replace(result, observation=told)

    async def _call(self, arguments: Mapping[str, Any], context: Context, cut: Cut) -> ToolResult:
        """What the function returns, in full. What it raises is cut."""
        given = self.schema.validate(arguments)
        for parameter in self.parameters_from_elsewhere:
            given[parameter.name] = self._fill_in(parameter, context)
        function, caller = await self._callable(context)
        try:
            value = await invoke(
                function, given, timeout_s=self.timeout_s, context=context, retries=self.retries, caller=caller
            )
        except Overrun:
            raise ToolTimeout(f"The call of {self.name!r} was stopped after {self.timeout_s:g} s.") from None
        except FunctionFailed as failed:
            self._raise_failure(failed, cut)
        try:
            return as_result(self.name, value, self._told)
        except AgentFlyError:
            raise
        except Exception as error:  # of the value's own code, when it is asked what it reads as
            self._raise_failure(FunctionFailed(error), cut)

    async def _callable(self, context: Context) -> tuple[Callable[..., Any], Caller]:
        if self.home is None:
            return self.function, THREADS
        instance, caller = await self.home.instance(context)
        return MethodType(self.function, instance), caller

    def _fill_in(self, parameter: Parameter, context: Context) -> Any:
        if parameter.source is Source.CONTEXT:
            return context
        try:
            return field_of_task(parameter.name, context, parameter.default)
        except KeyError as error:
            raise ToolDefinitionError(
                f"The tool {self.name!r} wants a field of the task, but {error.args[0]}. Rename the parameter, give it "
                "a default, or add the field to the tasks."
            ) from None

    def _raise_failure(self, failed: FunctionFailed, cut: Cut) -> NoReturn:
        error = failed.error
        if isinstance(error, ToolError):
            said = message_of(error)
            if (told := cut(said, self.max_output_tokens)) != said:
                raise ToolError(told) from error
        if isinstance(error, AgentFlyError):
            raise error from error.__cause__
        message = excerpt(say(error), ECHO_CHARS)
        outage = outage_in(error)
        if outage is None:
            self._tell_author(error, message)
            raise ToolCrashed(message) from error
        behind = (
            ""
            if outage is error
            else f" (because of {type(outage).__name__}: {excerpt(message_of(outage), ECHO_CHARS)})"
        )
        raise ToolUnavailable(
            f"The tool {self.name!r} failed with {message}{behind}. The machine or the network is to blame for that, "
            "so the rollout gets no reward: see that what the tool uses is there. If the model can cause it by what it "
            "asks for, catch the exception in the tool and raise agentfly.ToolError, which the model is told."
        ) from error

    def _tell_author(self, error: BaseException, message: str) -> None:
        """Log a crash, once for each place: the model may have caused it, but as likely it is a mistake in the tool."""
        place = Failure.of(error).place
        if place not in self._told:
            self._told.add(place)
            logger.warning(
                "The tool %r crashed with %s, at %s. The model is told and the rollout goes on; this place is not "
                "reported again. If the model can cause it, raise agentfly.ToolError with what it should know.",
                self.name,
                message,
                place or "an unknown place",
            )

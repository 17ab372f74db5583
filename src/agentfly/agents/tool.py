"""Tool: what the model can call, made from a function by `@tool`."""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn, overload

import docstring_parser
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.function import UserFunction, name_of
from agentfly.agents.invocation import FunctionFailed, Overrun, invoke
from agentfly.agents.needs import Needs, checked_needs, needs_for
from agentfly.agents.outage import outage_in
from agentfly.agents.parameters import (
    MISSING,
    FromTask,
    Parameter,
    Source,
    field_of_task,
    names_at,
    read_parameters,
)
from agentfly.agents.schema import Argument, ArgumentSchema
from agentfly.contexts.context import Context
from agentfly.errors import (
    AgentFlyError,
    ToolCrashed,
    ToolDefinitionError,
    ToolError,
    ToolTimeout,
    ToolUnavailable,
    message_of,
    say,
)
from agentfly.resources.spec import ResourceSpec
from agentfly.task import Task
from agentfly.trajectory import Failure

__all__ = ["FromTask", "Tool", "ToolResult", "tool"]

logger = logging.getLogger(__name__)

MAX_OUTPUT_CHARS = 16_000
"""The longest observation that a tool gives unless it says otherwise, in characters."""

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What a tool may be called."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call came to. A tool that returns anything else has it turned into one.

    Attributes:
        observation: the text that the model is given.
        reward: what the call was worth, if the tool says so.
        done: whether the task is finished.
        state: the state that the environment is in after the call, if the tool says so; anything that JSON can hold.
        info: anything else that JSON can hold, for those who read trajectories; the model does not see it.
    """

    observation: str
    reward: float | None = None
    done: bool = False
    state: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None and not (isinstance(self.reward, (int, float)) and math.isfinite(self.reward)):
            raise ToolDefinitionError(
                f"ToolResult(reward={self.reward!r}): the reward of a tool call must be a finite number, or None."
            )
        if not isinstance(self.info, Mapping):
            raise ToolDefinitionError(f"ToolResult(info={excerpt(repr(self.info), ECHO_CHARS)}): it must be a dict.")


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
        max_output_chars: an observation longer than this keeps its head and tail only, and says so.
    """

    description: str
    schema: ArgumentSchema
    parameters_from_elsewhere: tuple[Parameter, ...] = ()
    timeout_s: float | None = None
    max_output_chars: int = MAX_OUTPUT_CHARS
    _told: set[str] = field(default_factory=set, init=False)  # the places of crashes that the author was told of

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments that the model gives."""
        return self.schema.json_schema

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates and model APIs want it described."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"<tool {self.name}({', '.join(argument.name for argument in self.schema.arguments)})>"

    def needs(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """What the tool has declared that it needs for a task.

        Raises:
            ToolDefinitionError: the function that says so failed for this task.
        """
        try:
            return needs_for(self.resources, task)
        except ValueError as error:
            raise ToolDefinitionError(f"The tool {self.name!r}: {error}.") from error.__cause__

    async def call(self, arguments: Mapping[str, Any], context: Context) -> ToolResult:
        """Call the tool on behalf of a rollout, with the model's arguments.

        A sync function runs on a thread, so that it never holds up other rollouts.

        Raises:
            InvalidArguments: the arguments do not fit the schema.
            ToolTimeout: the call took longer than ``timeout_s``.
            ToolError: the tool says that the call did not work, or `ToolCrashed`: its code failed with an exception
                of another kind. The message of each of these is what the model should be told.
            ToolUnavailable: the tool's code failed because of the machine or the network (see `outage_in`).
            AgentFlyError: anything else that the model is not to blame for: a resource that could not be had, a task
                that lacks a field, a definition that is wrong.
        """
        given = self.schema.validate(arguments)
        for parameter in self.parameters_from_elsewhere:
            given[parameter.name] = self._fill_in(parameter, context)
        try:
            value = await invoke(self.function, given, timeout_s=self.timeout_s, context=context)
        except Overrun:
            raise ToolTimeout(f"The call of {self.name!r} was stopped after {self.timeout_s:g} s.") from None
        except FunctionFailed as failed:
            self._raise_failure(failed)
        result = self._as_result(value)
        return replace(result, observation=excerpt(result.observation, self.max_output_chars))

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

    def _raise_failure(self, failed: FunctionFailed) -> NoReturn:
        error = failed.error
        if isinstance(error, ToolError) and len(said := message_of(error)) > self.max_output_chars:
            raise ToolError(excerpt(said, self.max_output_chars)) from error
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

    def _as_result(self, value: Any) -> ToolResult:
        if not isinstance(value, ToolResult):
            return ToolResult(self._as_text(value))
        return replace(
            value,
            observation=self._as_text(value.observation),
            done=bool(value.done),
            state=self._as_json("state", value.state),
            info=self._as_json("info", dict(value.info)),
        )

    def _as_text(self, value: Any) -> str:
        if any(map(inspect.iscoroutine, _parts(value))):
            raise ToolDefinitionError(
                f"The tool {self.name!r} returned a coroutine in its result, {excerpt(repr(value), ECHO_CHARS)}: an "
                "`await` is missing before the call that made it. In a sync tool write context.wait(…)."
            )
        return _as_text(value)

    def _as_json(self, field: str, value: Any) -> Any:
        """``value`` as JSON gives it back, so that a saved trajectory is read as it was."""
        try:
            return json.loads(to_json(value, inf_nan_mode="strings"))
        except (ValueError, RecursionError) as error:
            raise ToolDefinitionError(
                f"The tool {self.name!r} returned ToolResult({field}=…) with something that JSON cannot hold: {error}. "
                "Return numbers, texts, lists, dicts, dataclasses or pydantic models; of an array, array.tolist()."
            ) from error


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    max_output_chars: int = MAX_OUTPUT_CHARS,
    resources: Needs = (),
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    max_output_chars: int = MAX_OUTPUT_CHARS,
    resources: Needs = (),
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: ``@tool``, or ``@tool(timeout_s=60)``.

    The docstring (Google, NumPy or reST style) tells the model what the tool does, and the type hints what it takes.
    A parameter of type `Context`, or named ``context``, gets the rollout's context, and one marked
    ``Annotated[T, FromTask()]`` the task's field of its name; the model sees neither. What the function returns
    becomes the observation: a text as it is, nothing as the empty text, an object that has words of its own (a
    ``__str__``, as a container's `CommandResult` has) in these words, anything else that JSON can hold as JSON; a
    `ToolResult` says more.

    Args:
        function: a sync or async function, or bound method. A sync one runs on a thread.
        name: what the model calls it; the function's name if it is not given.
        timeout_s: seconds that a call may take, waiting for resources not counted; None for any time.
        max_output_chars: an observation longer than this keeps its head and tail only, and says so.
        resources: specs of what the tool acquires with scope ``rollout``, or a function from the task to them. All that
            the tools and the reward of a rollout declare is got together, at the first acquire of one of it.

    Raises:
        ToolDefinitionError: the function cannot become a tool, for instance because it has no docstring.
    """
    if function is not None:
        return _make(function, names_at(1), name, timeout_s, max_output_chars, resources)

    def decorate(function: Callable[..., Any]) -> Tool:
        return _make(function, names_at(1), name, timeout_s, max_output_chars, resources)

    return decorate


def _make(
    function: Callable[..., Any],
    names: Mapping[str, Any],
    name: str | None,
    timeout_s: float | None,
    max_output_chars: int,
    resources: Needs,
) -> Tool:
    name = name or name_of(function)
    _require_settings(name, function, timeout_s, max_output_chars)
    described = docstring_parser.parse("\n" + (inspect.getdoc(function) or ""))  # sections begin after a line break
    description = (described.description or "").strip()
    if not description:
        raise ToolDefinitionError(
            f"The tool {name!r} has no docstring, so the model could not know what it does. Write one that says it in "
            "a sentence, with a line for each argument under 'Args:'."
        )
    try:
        parameters, resources = read_parameters(function, names), checked_needs(resources)
    except ValueError as error:
        raise ToolDefinitionError(f"{name!r} cannot become a tool: {error}") from None
    documented = {param.arg_name: " ".join((param.description or "").split()) for param in described.params}
    schema = _schema(name, [one for one in parameters if one.source is Source.CALLER], documented)
    elsewhere = tuple(one for one in parameters if one.source is not Source.CALLER)
    return Tool(function, name, description, schema, elsewhere, timeout_s, max_output_chars, resources=resources)


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


def _require_settings(
    name: str,
    function: Callable[..., Any],
    timeout_s: float | None,
    max_output_chars: int,
) -> None:
    if isinstance(function, Tool):
        raise ToolDefinitionError(f"{name!r} is a tool already; use @tool once.")
    if isinstance(function, type) or not callable(function):
        raise ToolDefinitionError(
            f"{name!r} is not a function. Put @tool on a function, or call it with a bound method."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolDefinitionError(f"The tool {name!r} yields, but an observation is one value: return it instead.")
    if not TOOL_NAME.fullmatch(name):
        raise ToolDefinitionError(
            f"{name!r} is no name that a model can call. Give one of letters, digits, '_' and '-', at most 64 of them: "
            "@tool(name=…)."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise ToolDefinitionError(f"The tool {name!r} has timeout_s={timeout_s}; it must be above 0, or None.")
    if max_output_chars < 1:
        raise ToolDefinitionError(f"The tool {name!r} has max_output_chars={max_output_chars}; it must be at least 1.")


def _parts(value: Any) -> Iterable[Any]:
    """A value, and what it holds, one level deep."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if not isinstance(value, str):
        try:
            value = str(value) if _has_words(value) else json.dumps(to_jsonable_python(value), ensure_ascii=False)
        except (PydanticSerializationError, ValueError, RecursionError):
            value = str(value)
    text: str = value
    return text.encode("utf-8", errors="replace").decode()  # a lone surrogate could not be tokenized or saved


def _has_words(value: Any) -> bool:
    """Whether an object's class says how it reads as text. A pydantic model's does so for programmers only."""
    own = any("__str__" in vars(kind) for kind in type(value).__mro__[:-1])
    return own and not isinstance(value, (BaseModel, Enum))

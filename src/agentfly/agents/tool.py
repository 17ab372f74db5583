"""The decorator `@tool`, which makes what the model can call of functions, methods and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from agentfly.agents.class_tool import ToolClass, ToolMethod, is_method, make_tool, mark
from agentfly.agents.definition import MAX_OUTPUT_TOKENS, Settings
from agentfly.agents.function import name_of
from agentfly.agents.function_tool import Tool
from agentfly.agents.needs import Needs
from agentfly.agents.parameters import FromTask, names_at
from agentfly.agents.tool_result import ToolResult
from agentfly.errors import ToolDefinitionError, type_of

__all__ = ["FromTask", "Tool", "ToolResult", "tool"]

C = TypeVar("C")


class Decorator(Protocol):
    """What `@tool(…)` gives: it makes a tool of a function, and marks a class."""

    @overload
    def __call__(self, function: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(function: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    retries: int = 0,
    resources: Needs = (),
) -> Decorator: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    retries: int = 0,
    resources: Needs = (),
) -> Any:
    """Make a tool of a function, a method or a class: ``@tool``, or ``@tool(timeout_s=60)``.

    The docstring (Google, NumPy or reST style) tells the model what the tool does, and the type hints what it takes.
    A parameter of type `Context`, or named ``context``, gets the rollout's context, and one marked
    ``Annotated[T, FromTask()]`` the task's field of its name; the model sees neither. What the function returns
    becomes the observation: a text as it is, nothing as the empty text, an object that has words of its own (a
    ``__str__``, as a container's `CommandResult` has) in these words, an image as an image, a list that holds images
    as text and images, anything else that JSON can hold as JSON; a `ToolResult` says more.

    * A **function** becomes a `Tool`, and can still be called as the function.
    * A **method** becomes one when it is taken from an instance, ``Agent(tools=[shop.search])``. All rollouts share
      the instance.
    * A **class** stays the class, and ``Agent(tools=[Notebook])`` has its methods as tools: those with ``@tool``, or
      else all public ones, named ``notebook_write`` and so on, and ``notebook`` for ``__call__``. Each rollout gets an
      instance of its own (see `agentfly.agents.class_tool.ToolClass`).

    Args:
        function: a function, a bound method, or a class. What is sync runs on a thread.
        name: what the model calls it; the function's name if it is not given. Of a class: how the names begin.
        timeout_s: seconds that a call may take with all its tries, waiting for resources not counted; None for any
            time.
        max_output_tokens: an observation longer than this keeps its head and tail only, and says so. The tokens are
            those of the policy's model; where it has no tokenizer here, four characters count as one.
        retries: how often a call is made again, after a pause, that failed because of a resource, the machine or the
            network. The call may have had its effect all the same, so it is for those that can be made twice.
        resources: specs of what the tool acquires with scope ``rollout``, or a function from the task to them. All that
            the tools and the reward of a rollout declare is got together, at the first acquire of one of it.

    Raises:
        ToolDefinitionError: the function cannot become a tool, for instance because it has no docstring.
    """
    settings = Settings(
        name=name, timeout_s=timeout_s, max_output_tokens=max_output_tokens, retries=retries, resources=resources
    )
    if function is not None:
        return _make(function, names_at(1), settings)

    def decorate(function: Callable[..., Any]) -> Any:
        return _make(function, names_at(1), settings)

    return decorate


def _make(function: Any, names: dict[str, Any], settings: Settings) -> Any:
    name = settings.name or name_of(function)
    if isinstance(function, (Tool, ToolMethod)):
        raise ToolDefinitionError(f"{name!r} is a tool already; use @tool once.")
    if isinstance(function, type):
        settings.check(name)
        mark(function, ToolClass(function, settings, names))
        return function
    if isinstance(function, (staticmethod, classmethod)):
        raise ToolDefinitionError(
            f"{name!r} is {type_of(function)}, which belongs to the class. Make a tool of what is taken from "
            "the class, for instance tool(Shop.search)."
        )
    if not callable(function):
        raise ToolDefinitionError(f"{name!r} is not a function. Put @tool on a function, a method or a class.")
    made = make_tool(function, name, names, settings)
    return ToolMethod(function, name, tool=made, named=settings.name is not None) if is_method(function) else made

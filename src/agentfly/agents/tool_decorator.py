"""The decorator `@tool`, which makes tools from functions, methods and classes."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar, overload

from agentfly.agents.invocation import FunctionFailed, FunctionTimeout, ThreadCaller, call_once, call_user_function
from agentfly.agents.tool import MAX_OUTPUT_TOKENS, Tool, ToolSettings, describe_function
from agentfly.agents.tool_result import ToolResult
from agentfly.agents.transient_errors import find_transient_error
from agentfly.agents.user_function import (
    MISSING,
    DeclaredResources,
    FromTask,
    Parameter,
    ParameterSource,
    UserFunction,
    caller_locals,
    function_name,
    read_parameters,
    task_field,
    validate_resources,
)
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AgentFlyError,
    ConfigError,
    ToolDefinitionError,
    ToolUnavailable,
    describe_error,
    type_of,
)
from agentfly.core.signals import should_propagate
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.core.threads.run import DedicatedThread

_MARK = "__agentfly_tools__"
_ENDS = ("close", "aclose")


def make_tool(function: Callable[..., Any], name: str, names: Mapping[str, Any], settings: ToolSettings) -> Tool:
    """Make a tool from a function, or from a method without its instance.

    Args:
        function: the function.
        name: the name by which the model calls it.
        names: local names at the definition.
        settings: the settings of the decorator.

    Raises:
        ToolDefinitionError: the function cannot become a tool.
    """
    settings.check(name)
    defined = describe_function(function, name, names, method=is_method(function))
    return Tool(
        function,
        name,
        defined.description,
        defined.schema,
        defined.injected_parameters,
        settings.timeout_s,
        settings.max_output_tokens,
        settings.retries,
        resources=validate_resources(settings.resources),
    )


def is_method(function: Callable[..., Any]) -> bool:
    """Whether a function is defined in a class and its first parameter is the instance: ``self``, or without a type."""
    if not isinstance(function, FunctionType):
        return False
    parent = function.__qualname__.rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if not parent or parent.endswith("<locals>") or first is None:
        return False
    return first.name == "self" or first.annotation is MISSING


@dataclass(frozen=True, eq=False, repr=False)
class ToolMethod(UserFunction):
    """A method with the decorator `@tool`. Accessed on an instance it is a tool: ``Agent(tools=[shop.search])``.

    Attributes:
        tool: the tool without its instance.
        named: whether the user set its name.
    """

    tool: Tool
    named: bool

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.of(instance)

    def of(self, instance: object, name: str | None = None) -> Tool:
        """Return the tool of an instance, optionally under another name."""
        return replace(self.tool, function=MethodType(self.tool.function, instance), name=name or self.name)

    def __repr__(self) -> str:
        return f"<tool method {self.__dict__['__qualname__']}>"


class ToolClass:
    """The tools that are methods of a class. Each rollout has its own instance, made at the first call.

    The constructor's parameters select its arguments: the context, and fields of the task. If the class has sync tools,
    all its sync code (constructor, methods, ``close``) runs on one dedicated thread. A class with only async tools runs
    in the event loop. When the rollout ends, ``aclose`` or ``close`` is called.

    Args:
        owner: the class.
        settings: default settings of its tools.
        names: local names at the definition.

    Raises:
        ToolDefinitionError: the class or one of its methods cannot become a tool.
    """

    def __init__(self, owner: type, settings: ToolSettings, names: Mapping[str, Any]) -> None:
        self.owner = owner
        self._settings = settings
        self._names = dict(names)
        self._methods = dict(self._find_methods())
        if not self._methods:
            raise ToolDefinitionError(
                f"The class {owner.__name__} has nothing that the model could call: it needs public methods, or "
                "__call__, each with a docstring."
            )
        self.parameters = self._constructor()
        self._sync = any(not inspect.iscoroutinefunction(method.function) for method in self._methods.values())
        self.tools = tuple(
            replace(method.tool, instance_provider=self, name=name) for name, method in self._methods.items()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_names": {}}  # local names at the definition are not pickled

    def tools_of_instance(self, instance: object) -> list[Tool]:
        """Return the tools of an instance that the user made."""
        return [method.of(instance, name) for name, method in self._methods.items()]

    def inherited_by(self, owner: type) -> ToolClass:
        """Return the tools of a subclass."""
        return self if owner is self.owner else ToolClass(owner, self._settings, self._names)

    async def instance(self, context: Context) -> tuple[object, ThreadCaller]:
        """Return the rollout's instance, and the caller for its sync methods.

        Raises:
            ToolDefinitionError: the constructor failed, or requires a field that the task does not have.
            ToolUnavailable: the constructor failed because of the machine or the network.
            AgentFlyError: another infrastructure failure in the constructor.
        """
        kept = await context.cached(self.owner, self._make, _ToolInstance.close)
        return kept.instance, kept.caller

    async def _make(self, context: Context) -> _ToolInstance:
        given = {one.name: self._value(one, context) for one in self.parameters}
        if not self._sync:
            try:
                return _ToolInstance(self.owner(**given), THREAD_POOL)
            except BaseException as error:  # SystemExit, and what other languages' bindings raise
                if should_propagate(error, asyncio.current_task()):
                    raise
                raise self._failure(error) from error
        thread, limit = DedicatedThread(), self._settings.timeout_s
        try:
            return _ToolInstance(
                await call_user_function(self.owner, given, timeout_s=limit, context=context, caller=thread), thread
            )
        except BaseException as error:
            thread.close()
            if isinstance(error, FunctionTimeout):
                raise ToolUnavailable(f"{self.owner.__name__} was not made within {limit:g} s.") from None
            if isinstance(error, FunctionFailed):
                raise self._failure(error.error) from error.error
            raise

    def _failure(self, error: BaseException) -> AgentFlyError:
        """Return the typed error of a failed constructor. It is never the model's fault."""
        if isinstance(error, AgentFlyError) and not error.by_policy:
            return error
        failed = f"{self.owner.__name__}(…) failed with {describe_error(error)}"
        if find_transient_error(error) is not None:
            return ToolUnavailable(f"{failed}. The machine or the network is to blame for that.")
        return ToolDefinitionError(f"{failed}. The model has no part in that: mend the constructor.")

    def _value(self, parameter: Parameter, context: Context) -> Any:
        if parameter.source is ParameterSource.CONTEXT:
            return context
        try:
            return task_field(parameter.name, context, parameter.default)
        except KeyError as error:
            raise ToolDefinitionError(
                f"{self.owner.__name__}({parameter.name}=…) wants a field of the task, but {error.args[0]}. A class of "
                "tools is made with 'context' and fields of the task: rename the parameter, give it a default, or add "
                "the field to the tasks."
            ) from None

    def _find_methods(self) -> Iterable[tuple[str, ToolMethod]]:
        """Yield methods with their tool names: those with `@tool` if there are any, otherwise all public ones."""
        found = _methods_of(self.owner)
        marked = {name: value for name, value in found.items() if isinstance(value, ToolMethod)}
        prefix = self._settings.name or _snake(self.owner.__name__)
        for name, value in (marked or found).items():
            called = prefix if name == "__call__" else f"{prefix}_{name}"
            if isinstance(value, ToolMethod):
                yield (value.name if value.named else called), value
            elif name == "__call__" or not (name.startswith("_") or name in _ENDS):
                tool = make_tool(value, called, self._names, self._settings)
                yield called, ToolMethod(value, called, tool=tool, named=False)

    def _constructor(self) -> tuple[Parameter, ...]:
        if self.owner.__init__ is object.__init__:  # type: ignore[misc]
            return ()
        try:
            return read_parameters(self.owner.__init__, self._names)[1:]  # type: ignore[misc]
        except ValueError as error:
            raise ToolDefinitionError(f"{self.owner.__name__} cannot become a class of tools: {error}") from None


@dataclass(frozen=True)
class _ToolInstance:
    """An instance, and the caller of its sync code: its dedicated thread, or the pool if it has no sync tools."""

    instance: Any
    caller: ThreadCaller

    async def close(self) -> None:
        try:
            for name in ("aclose", "close"):
                if callable(close := getattr(self.instance, name, None)):
                    if isinstance(self.caller, DedicatedThread) or inspect.iscoroutinefunction(close):
                        await call_once(close, {}, self.caller)
                    else:
                        close()
                    return
        finally:
            if isinstance(self.caller, DedicatedThread):
                self.caller.close()


def expand_tools(given: object) -> list[Tool] | None:
    """Return the tools for an item of ``Agent(tools=[…])``; None if it has none.

    A tool gives itself. A class with `@tool` gives its tools, with one instance per rollout. An instance of such a
    class, or of one with `@tool` methods, gives its tools, and all rollouts share the instance.

    Raises:
        ConfigError: it is a method without its instance.
    """
    if isinstance(given, Tool):
        return [given]
    if isinstance(given, ToolMethod):
        raise ConfigError(
            f"Agent(tools=…) holds {given!r} without an instance. Take it from one, for instance "
            f"{given.__dict__['__qualname__'].replace('.', '().')}; or put @agentfly.tool on the class, give that, and "
            "each rollout gets an instance of its own."
        )
    owner = given if isinstance(given, type) else type(given)
    whole: ToolClass | None = getattr(owner, _MARK, None)
    if whole is not None:
        whole = whole.inherited_by(owner)
        return list(whole.tools) if isinstance(given, type) else whole.tools_of_instance(given)
    methods = {} if isinstance(given, type) else _methods_of(owner)
    return [one.of(given) for one in methods.values() if isinstance(one, ToolMethod)] or None


def register_tool_class(owner: type, tools: ToolClass) -> None:
    """Attach the tools to their class."""
    setattr(owner, _MARK, tools)


def _methods_of(owner: type) -> dict[str, FunctionType | ToolMethod]:
    """Return the methods of a class and its bases by name, in the order of their definition."""
    found: dict[str, FunctionType | ToolMethod] = {}
    for kind in reversed(owner.__mro__[:-1]):
        for name, value in vars(kind).items():
            found.pop(name, None)
            if isinstance(value, (FunctionType, ToolMethod)):
                found[name] = value
    return found


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


__all__ = ["FromTask", "Tool", "ToolResult", "tool"]

C = TypeVar("C")


class ToolDecorator(Protocol):
    """The decorator that `@tool(…)` returns: it makes a tool from a function, and registers a class."""

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
    resources: DeclaredResources = (),
) -> ToolDecorator: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    retries: int = 0,
    resources: DeclaredResources = (),
) -> Any:
    """Make a tool from a function, a method or a class: ``@tool``, or ``@tool(timeout_s=60)``.

    The docstring (Google, NumPy or reST style) describes the tool to the model, and the type hints give its arguments.
    A parameter of type `Context`, or named ``context``, gets the rollout's context. One annotated with
    ``Annotated[T, FromTask()]`` gets the task's field with its name. The model sees neither. The return value becomes
    the observation: text is unchanged, None is empty text, an object with a ``__str__`` (such as a container's
    `CommandResult`) is its text, an image is an image, a list with images is text and images, and any other JSON value
    is JSON. A `ToolResult` has further fields.

    * A **function** becomes a `Tool`, and can still be called as the function.
    * A **method** becomes a tool when it is accessed on an instance, ``Agent(tools=[shop.search])``. All rollouts share
      the instance.
    * A **class** stays the class. ``Agent(tools=[Notebook])`` has its methods as tools: those with ``@tool``, or
      otherwise all public ones, named ``notebook_write`` and so on, and ``notebook`` for ``__call__``. Each rollout
      gets its own instance (see `ToolClass`).

    Args:
        function: a function, a bound method, or a class. Sync code runs on a thread.
        name: the name by which the model calls it; by default the function's name. For a class: the prefix of names.
        timeout_s: time limit of a call in seconds for all tries together, without waiting for resources; None for no
            limit.
        max_output_tokens: a longer observation is truncated to its head and tail, with a note. Tokens are counted with
            the policy's tokenizer; without one, four characters count as one token.
        retries: number of retries, with delays, after failures of a resource, the machine or the network. A failed call
            may have had its effect, so use it only for calls that can be repeated.
        resources: specs that the tool acquires with scope ``rollout``, or a function from the task to them. The first
            acquire of one gets all that the tools and the reward of a rollout declare.

    Raises:
        ToolDefinitionError: the function cannot become a tool, for instance because it has no docstring.
    """
    settings = ToolSettings(
        name=name, timeout_s=timeout_s, max_output_tokens=max_output_tokens, retries=retries, resources=resources
    )
    if function is not None:
        return _make(function, caller_locals(1), settings)

    def decorate(function: Callable[..., Any]) -> Any:
        return _make(function, caller_locals(1), settings)

    return decorate


def _make(function: Any, names: dict[str, Any], settings: ToolSettings) -> Any:
    name = settings.name or function_name(function)
    if isinstance(function, (Tool, ToolMethod)):
        raise ToolDefinitionError(f"{name!r} is a tool already; use @tool once.")
    if isinstance(function, type):
        settings.check(name)
        register_tool_class(function, ToolClass(function, settings, names))
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

"""Tools that are methods: of an instance that the user made, or of a class of which each rollout gets one instance."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

from agentfly.agents.definition import Settings, define
from agentfly.agents.function import UserFunction
from agentfly.agents.function_tool import Tool
from agentfly.agents.invocation import Caller, FunctionFailed, Overrun, call, invoke
from agentfly.agents.needs import checked_needs
from agentfly.agents.outage import outage_in
from agentfly.agents.parameters import MISSING, Parameter, Source, field_of_task, read_parameters
from agentfly.contexts.context import Context
from agentfly.errors import AgentFlyError, ConfigError, ToolDefinitionError, ToolUnavailable, say
from agentfly.interruption import must_pass
from agentfly.threads.dedicated import DedicatedThread
from agentfly.threads.pool import THREADS

_MARK = "__agentfly_tools__"
_ENDS = ("close", "aclose")


def make_tool(function: Callable[..., Any], name: str, names: Mapping[str, Any], settings: Settings) -> Tool:
    """A tool of a function, or of a method without its instance.

    Args:
        function: the function.
        name: what the model calls it.
        names: names that are local to the place of definition.
        settings: what the user said beside.

    Raises:
        ToolDefinitionError: it cannot become a tool.
    """
    settings.check(name)
    defined = define(function, name, names, method=is_method(function))
    return Tool(
        function,
        name,
        defined.description,
        defined.schema,
        defined.elsewhere,
        settings.timeout_s,
        settings.max_output_tokens,
        settings.retries,
        resources=checked_needs(settings.resources),
    )


def is_method(function: Callable[..., Any]) -> bool:
    """Whether a function was written in a class, and its first parameter is the instance: ``self``, or of no type."""
    if not isinstance(function, FunctionType):
        return False
    parent = function.__qualname__.rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if not parent or parent.endswith("<locals>") or first is None:
        return False
    return first.name == "self" or first.annotation is MISSING


@dataclass(frozen=True, eq=False, repr=False)
class ToolMethod(UserFunction):
    """A method that `@tool` was put on. Taken from an instance it is a tool: ``Agent(tools=[shop.search])``.

    Attributes:
        tool: the tool without its instance.
        named: whether the user gave it its name.
    """

    tool: Tool
    named: bool

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.of(instance)

    def of(self, instance: object, name: str | None = None) -> Tool:
        """The tool of an instance, perhaps under another name."""
        return replace(self.tool, function=MethodType(self.tool.function, instance), name=name or self.name)

    def __repr__(self) -> str:
        return f"<tool method {self.__dict__['__qualname__']}>"


class ToolClass:
    """The tools that are methods of a class. Each rollout has an instance of its own, made at its first call of one.

    The instance is made with what its constructor asks for by parameter: the context, and fields of the task. If the
    class has sync tools, all its sync code runs on one thread: the constructor, the methods, ``close``. A class whose
    tools are all async lives in the event loop. When the rollout ends, ``aclose`` or ``close`` is called.

    Args:
        owner: the class.
        settings: what holds for all its tools that do not say otherwise.
        names: names that are local to the place of definition.

    Raises:
        ToolDefinitionError: the class or one of its methods cannot become a tool.
    """

    def __init__(self, owner: type, settings: Settings, names: Mapping[str, Any]) -> None:
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
        self.tools = tuple(replace(method.tool, home=self, name=name) for name, method in self._methods.items())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_names": {}}  # what lay around the definition does not travel

    def of(self, instance: object) -> list[Tool]:
        """The tools of an instance that the user made."""
        return [method.of(instance, name) for name, method in self._methods.items()]

    def inherited_by(self, owner: type) -> ToolClass:
        """The same for a subclass."""
        return self if owner is self.owner else ToolClass(owner, self._settings, self._names)

    async def instance(self, context: Context) -> tuple[object, Caller]:
        """The rollout's instance, and what calls its sync methods.

        Raises:
            ToolDefinitionError: the constructor failed, or wants a field that the task does not have.
            ToolUnavailable: it failed because of the machine or the network.
            AgentFlyError: another failure of infrastructure in it.
        """
        kept = await context.keep(self.owner, self._make, _Kept.close)
        return kept.instance, kept.caller

    async def _make(self, context: Context) -> _Kept:
        given = {one.name: self._value(one, context) for one in self.parameters}
        if not self._sync:
            try:
                return _Kept(self.owner(**given), THREADS)
            except BaseException as error:  # SystemExit, and what other languages' bindings raise
                if must_pass(error, asyncio.current_task()):
                    raise
                raise self._failure(error) from error
        thread, limit = DedicatedThread(), self._settings.timeout_s
        try:
            return _Kept(await invoke(self.owner, given, timeout_s=limit, context=context, caller=thread), thread)
        except BaseException as error:
            thread.end()
            if isinstance(error, Overrun):
                raise ToolUnavailable(f"{self.owner.__name__} was not made within {limit:g} s.") from None
            if isinstance(error, FunctionFailed):
                raise self._failure(error.error) from error.error
            raise

    def _failure(self, error: BaseException) -> AgentFlyError:
        """What becomes of an instance that could not be made: in no case the model's fault."""
        if isinstance(error, AgentFlyError) and not error.by_policy:
            return error
        failed = f"{self.owner.__name__}(…) failed with {say(error)}"
        if outage_in(error) is not None:
            return ToolUnavailable(f"{failed}. The machine or the network is to blame for that.")
        return ToolDefinitionError(f"{failed}. The model has no part in that: mend the constructor.")

    def _value(self, parameter: Parameter, context: Context) -> Any:
        if parameter.source is Source.CONTEXT:
            return context
        try:
            return field_of_task(parameter.name, context, parameter.default)
        except KeyError as error:
            raise ToolDefinitionError(
                f"{self.owner.__name__}({parameter.name}=…) wants a field of the task, but {error.args[0]}. A class of "
                "tools is made with 'context' and fields of the task: rename the parameter, give it a default, or add "
                "the field to the tasks."
            ) from None

    def _find_methods(self) -> Iterable[tuple[str, ToolMethod]]:
        """The methods by the names of their tools: those with `@tool` where there are such, else all public ones."""
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
class _Kept:
    """An instance, and what calls its sync code: the thread on which it lives, or any where it has no sync tools."""

    instance: Any
    caller: Caller

    async def close(self) -> None:
        try:
            for name in ("aclose", "close"):
                if callable(close := getattr(self.instance, name, None)):
                    if isinstance(self.caller, DedicatedThread) or inspect.iscoroutinefunction(close):
                        await call(close, {}, self.caller)
                    else:
                        close()
                    return
        finally:
            if isinstance(self.caller, DedicatedThread):
                self.caller.end()


def tools_of(given: object) -> list[Tool] | None:
    """The tools that something given as ``Agent(tools=[…])`` stands for; None if it is nothing of that kind.

    A tool stands for itself; a class that `@tool` was put on for its tools, with an instance for each rollout; an
    instance of such a class, or of one with methods that `@tool` was put on, for its tools, shared by all rollouts.

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
        return list(whole.tools) if isinstance(given, type) else whole.of(given)
    methods = {} if isinstance(given, type) else _methods_of(owner)
    return [one.of(given) for one in methods.values() if isinstance(one, ToolMethod)] or None


def mark(owner: type, tools: ToolClass) -> None:
    """Have a class known by its tools."""
    setattr(owner, _MARK, tools)


def _methods_of(owner: type) -> dict[str, FunctionType | ToolMethod]:
    """The methods of a class and of what it inherits from, by name, in the order in which they were written."""
    found: dict[str, FunctionType | ToolMethod] = {}
    for kind in reversed(owner.__mro__[:-1]):
        for name, value in vars(kind).items():
            found.pop(name, None)
            if isinstance(value, (FunctionType, ToolMethod)):
                found[name] = value
    return found


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

"""Parameters: what a function asks for by its signature, and where each value comes from."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from agentfly.contexts.context import Context
from agentfly.json_values import own_copy

MISSING: Any = inspect.Parameter.empty
"""Stands where a parameter has no annotation, or no default."""


@dataclass(frozen=True, slots=True)
class FromTask:
    """Marks a tool's parameter that the task fills in, not the model.

    ``answer: Annotated[str, FromTask()]`` gets the task's field ``answer``. The model never sees the parameter.
    """


class Source(StrEnum):
    """Where a parameter's value comes from."""

    CALLER = "caller"  # the model, for a tool; the rollout, for a reward
    CONTEXT = "context"
    TASK_FIELD = "task field"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    Attributes:
        name: its name.
        annotation: its type, with names resolved; `MISSING` if it has none, a text if the text could not be resolved.
        default: its default; `MISSING` if it has none.
        source: where its value comes from.
    """

    name: str
    annotation: Any
    default: Any
    source: Source

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is MISSING


def read_parameters(function: Callable[..., Any], names: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The parameters of a function.

    Args:
        function: any callable that is called with its arguments by name.
        names: names that are local to the place of definition, which annotations written as text may use.

    Raises:
        ValueError: a parameter cannot be given by name; the message says which and what to do.
    """
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        _refuse_nameless(parameter)
    return tuple(_read(function, parameter, names) for parameter in parameters)


def names_at(depth: int) -> dict[str, Any]:
    """The local names of the function that is ``depth`` calls up: where a decorator is used, say."""
    frame = sys._getframe(depth + 1)
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def field_of_task(name: str, context: Context, default: Any) -> Any:
    """A field of the rollout's task: a copy, so that whoever writes into it changes no other attempt at the task.

    Raises:
        KeyError: the task has no such field and there is no default; the message names the fields there are.
    """
    task = context.trajectory.task
    if name not in task.fields and default is not MISSING:
        return default
    return own_copy(task[name])


def _refuse_nameless(parameter: inspect.Parameter) -> None:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise ValueError(f"it takes '{parameter}', but every parameter must have a name of its own. Write them out.")
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ValueError(
            f"its parameter {parameter.name!r} cannot be given by name. Remove the '/' from the signature."
        )


def _read(function: Callable[..., Any], parameter: inspect.Parameter, names: Mapping[str, Any]) -> Parameter:
    annotation = _resolve(function, parameter.annotation, names)
    is_context = _mentions_context(annotation)
    if parameter.name == "context" and not is_context and not (annotation is MISSING or isinstance(annotation, str)):
        raise ValueError(
            f"its parameter 'context' is of type {inspect.formatannotation(annotation)}, but that name stands for the "
            "rollout's Context. Give the parameter another name, or the type Context."
        )
    if is_context or parameter.name == "context":
        source = Source.CONTEXT
    elif typing.get_origin(annotation) is Annotated and any(map(_is_mark, annotation.__metadata__)):
        source = Source.TASK_FIELD
    else:
        source = Source.CALLER
    return Parameter(parameter.name, annotation, parameter.default, source)


def _resolve(function: Callable[..., Any], annotation: Any, names: Mapping[str, Any]) -> Any:
    if annotation is MISSING:
        return MISSING
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    inner = inspect.unwrap(function)
    inner = getattr(inner, "__func__", inner)
    closure = getattr(inner, "__closure__", None) or ()
    code = getattr(inner, "__code__", None)
    local = dict(names)
    for name, cell in zip(code.co_freevars if code else (), closure, strict=True):
        try:
            local[name] = cell.cell_contents
        except ValueError:  # not bound yet: the function is defined before what it refers to
            continue
    try:
        return typing.get_type_hints(holder, getattr(inner, "__globals__", {}), local, include_extras=True)["it"]
    except (NameError, SyntaxError, TypeError, AttributeError):  # whoever needs the type says that it is unknown
        return annotation


def _mentions_context(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    return any(isinstance(one, type) and issubclass(one, Context) for one in (annotation, *typing.get_args(annotation)))


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, FromTask) or mark is FromTask

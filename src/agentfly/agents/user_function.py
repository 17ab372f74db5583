"""UserFunction: a decorated function, its parameters, and the resources that it declares."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from agentfly.contexts.context import Context
from agentfly.core.errors import UsageError, error_message
from agentfly.core.json_values import own_copy
from agentfly.core.task import Task
from agentfly.resources.environments.pickling import find_unpicklable, is_importable
from agentfly.resources.spec import ResourceSpec

MISSING: Any = inspect.Parameter.empty
"""Marks a missing annotation or default of a parameter."""


@dataclass(frozen=True, slots=True)
class FromTask:
    """Marks a tool's parameter that the task fills in, not the model.

    ``answer: Annotated[str, FromTask()]`` gets the task's field ``answer``. The model never sees the parameter.
    """


class ParameterSource(StrEnum):
    """The source of a parameter's value."""

    MODEL_OR_ROLLOUT = "caller"  # the model, for a tool; the rollout, for a reward
    CONTEXT = "context"
    TASK_FIELD = "task field"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    Attributes:
        name: its name.
        annotation: its type, with names resolved; `MISSING` if it has none; a string if that could not be resolved.
        default: its default; `MISSING` if it has none.
        source: where its value comes from.
    """

    name: str
    annotation: Any
    default: Any
    source: ParameterSource

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is MISSING


def read_parameters(function: Callable[..., Any], names: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Read the parameters of a function.

    Args:
        function: any callable that is called with keyword arguments.
        names: local names at the definition, which annotations written as text may use.

    Raises:
        ValueError: a parameter cannot be given by name; the message says which and what to do.
    """
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        _refuse_nameless(parameter)
    return tuple(_read(function, parameter, names) for parameter in parameters)


def caller_locals(depth: int) -> dict[str, Any]:
    """Return the local names of the function ``depth`` calls up, for instance where a decorator is used."""
    frame = sys._getframe(depth + 1)
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def task_field(name: str, context: Context, default: Any) -> Any:
    """Return a copy of a field of the rollout's task. Changes to the copy do not reach other attempts.

    Raises:
        KeyError: the task has no such field and there is no default; the message lists the task's fields.
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
        source = ParameterSource.CONTEXT
    elif typing.get_origin(annotation) is Annotated and any(map(_is_mark, annotation.__metadata__)):
        source = ParameterSource.TASK_FIELD
    else:
        source = ParameterSource.MODEL_OR_ROLLOUT
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
    except (NameError, SyntaxError, TypeError, AttributeError):  # a caller that needs the type reports it
        return annotation


def _mentions_context(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    return any(isinstance(one, type) and issubclass(one, Context) for one in (annotation, *typing.get_args(annotation)))


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, FromTask) or mark is FromTask


AnySpec = ResourceSpec[Any]

DeclaredResources = Sequence[AnySpec] | Callable[[Task], Sequence[AnySpec]]
"""The specs themselves, or a function from the task to them, for instance where each task has an image of its own."""


def validate_resources(needs: Any) -> DeclaredResources:
    """Return the value of ``resources=`` as a tuple of specs or a function.

    Raises:
        ValueError: it is neither specs nor a function.
    """
    return needs if callable(needs) and not isinstance(needs, ResourceSpec) else _specs(needs)


def resources_for_task(needs: DeclaredResources, task: Task) -> tuple[AnySpec, ...]:
    """Return the specs for a task.

    Raises:
        ValueError: the function failed or returned something other than specs.
    """
    if not callable(needs):
        return tuple(needs)
    try:
        found = needs(task.copy())
    except Exception as error:
        raise ValueError(
            f"resources= is a function, which failed for task {task.id} with {type(error).__name__}: "
            f"{error_message(error)}"
        ) from error
    return _specs(found)


def _specs(needs: Any) -> tuple[AnySpec, ...]:
    if isinstance(needs, Iterable) and not isinstance(needs, (str, bytes)):
        specs = tuple(needs)
        if all(isinstance(spec, ResourceSpec) for spec in specs):
            return specs
    kind = type(needs).__name__
    found = f"one {kind}: put it in a list, [{kind}(…)]" if isinstance(needs, ResourceSpec) else f"{needs!r:.200}"
    raise ValueError(
        "resources= is to be a list of resource specs, for instance [ContainerSpec(…)], or a function from the task "
        f"to one, and this is {found}"
    )


@dataclass(frozen=True, eq=False, repr=False)
class UserFunction:
    """Base of decorated functions. Callable as the function, and picklable although it replaces it in its module.

    Attributes:
        function: the function.
        name: its name in AgentFly.
        resources: the resources that it declares for the whole rollout.
    """

    function: Callable[..., Any]
    name: str
    resources: DeclaredResources = field(default=(), kw_only=True)

    _kind: ClassVar[str]
    _mistake: ClassVar[type[UsageError]]  # type of the errors for its author

    def __post_init__(self) -> None:
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            self.__dict__[attribute] = getattr(self.function, attribute, None)
        self.__dict__["__wrapped__"] = self.function

    def resources_for(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """Return the resources that it declares for a task.

        Raises:
            ToolDefinitionError, RewardDefinitionError: its ``resources`` function failed for this task.
        """
        try:
            return resources_for_task(self.resources, task)
        except ValueError as error:
            raise self._mistake(f"The {self._kind} {self.name!r}: {error}.") from error.__cause__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself. Nothing is validated or filled in, and a coroutine must be awaited."""
        return self.function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Pickle by name where another process can import it, like functions; otherwise by value with cloudpickle."""
        module, path = self.__dict__["__module__"], self.__dict__["__qualname__"]
        if module in sys.modules and module != "__main__" and path and is_importable(module):
            try:
                if attrgetter(path)(sys.modules[module]) is self:
                    return str(path)
            except AttributeError:  # it is local to a function, or has been replaced
                pass
        self._require_portable()
        return super().__reduce_ex__(protocol)

    def _require_portable(self) -> None:
        """Raise unless it can be pickled by value.

        Raises:
            UsageError: a part cannot be pickled; the message gives the path to that part.
        """
        if _checking.get():  # it refers to itself
            return
        token = _checking.set(True)
        try:
            for part, name in ((self.function, self.name), (self.resources, f"{self.name}.resources")):
                if not _pickles(part):
                    path, culprit = find_unpicklable(part, name, _pickles)
                    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
                    raise UsageError(
                        f"{path} is a {kind}, which cannot be pickled, and so {self.name} cannot travel to another "
                        "process. Make it at its first use, or take it from a resource: context.acquire(…)."
                    )
        finally:
            _checking.reset(token)


_checking: ContextVar[bool] = ContextVar("_checking", default=False)


def _pickles(value: Any) -> bool:
    import cloudpickle  # here, because only those who pickle need it

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a callable."""
    return str(getattr(function, "__name__", type(function).__name__))

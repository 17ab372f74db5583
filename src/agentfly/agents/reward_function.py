"""RewardFunction: a user's scoring function, called by its parameter names, in this process or a separate one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from agentfly.agents.invocation import FunctionFailed, FunctionTimeout, call_user_function
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.user_function import (
    MISSING,
    DeclaredResources,
    Parameter,
    ParameterSource,
    UserFunction,
    function_name,
    read_parameters,
    task_field,
    validate_resources,
)
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AgentFlyError,
    ConfigError,
    ResourceDied,
    RewardDefinitionError,
    RewardError,
    ToolError,
    UsageError,
    describe_error,
)
from agentfly.core.numbers import is_duration
from agentfly.core.task import Task
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.spec import EnvironmentVariables, ResourceSpec


@dataclass(frozen=True, kw_only=True)
class RewardProcessSpec(EnvironmentSpec):
    """Spec of the processes that compute the scores of one reward, one score at a time in each."""

    @property
    def label(self) -> str:
        """``reward`` and the reward's name."""
        return f"reward:{self._name}"

    def timeout_message(self, method: str) -> str:
        """Return the message for a score that exceeded ``timeout_s``."""
        return f"the reward {self._name!r} gave no score within {self.call_timeout_s:g} s"

    @property
    def _name(self) -> str:
        return str(getattr(self.factory, "__name__", self.factory))


@dataclass(frozen=True)
class RewardWorker:
    """Computes scores in a reward process. It is its own factory, so that the reward is imported before the fork.

    Args:
        func: the reward.
    """

    func: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return str(getattr(self.func, "name", self.func))

    def __call__(self) -> RewardWorker:
        return self

    def reset(self) -> None:
        """Cancel an alarm that a score has set, so that it does not hit the next score."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def score(self, arguments: Mapping[str, Any]) -> Any:
        """Call the reward's function and return its result."""
        return self.func(**arguments)


def reward_process(
    reward: Callable[..., Any], *, timeout_s: float, workers: int | None, memory: int | str, env: EnvironmentVariables
) -> RewardProcessSpec:
    """Make the spec of a reward's processes.

    Raises:
        UsageError: the reward cannot be pickled. The message names the part that cannot.
        ConfigError: a value is invalid.
    """
    return RewardProcessSpec(
        factory=RewardWorker(reward),
        runs="process",
        reuse="reset",
        env=env,
        result_types=(RewardResult,),
        call_timeout_s=timeout_s,
        capacity=workers if workers is not None else len(os.sched_getaffinity(0)),
        memory=memory,
    )


async def score_in_process(spec: RewardProcessSpec, arguments: Mapping[str, Any], context: Context) -> Any:
    """Compute a score in one of a reward's processes, once one is free.

    Raises:
        FunctionTimeout: it took too long. Its process was killed, and is replaced when the next score needs it.
        FunctionFailed: the reward raised, ended its process, or an argument or the result cannot be pickled.
        AgentFlyError: no process is available.
    """
    async with context.lease(spec) as scorer:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            return await scorer.call("score", arguments)
        except ResourceDied as error:
            if loop.time() - started >= spec.call_timeout_s:
                raise FunctionTimeout from None
            raise FunctionFailed(error) from None
        except Exception as error:
            raise FunctionFailed(error) from None


F = TypeVar("F", bound="RewardFunction")

_OF_RECORD = frozenset({"trajectory", "trajectories", "task", "prompt"})


@dataclass(frozen=True, eq=False, repr=False)
class RewardFunction(UserFunction):
    """Base of the objects that `@reward` and `@group_reward` make from a function.

    Attributes:
        function: the function.
        name: its name in messages and records.
        parameters: its parameters.
        timeout_s: time limit of a score in seconds, without waiting for resources; None for no limit.
        process: whether it runs in separate processes, which are killed at the time limit.
        workers: maximum number of such processes; None for one per processor.
        memory: memory limit of such a process.
        env: its environment variables, in addition to the basic ones that programs need.
    """

    parameters: tuple[Parameter, ...]
    timeout_s: float | None = None
    process: bool = False
    workers: int | None = None
    memory: int | str = 0
    env: EnvironmentVariables = ()

    _decorator: ClassVar[str]
    injectable_names: ClassVar[tuple[str, ...]]
    """Parameter names that are filled in with something other than a task field, besides the context."""

    _kind: ClassVar[str] = "reward"
    _mistake: ClassVar[type[UsageError]] = RewardDefinitionError

    def __repr__(self) -> str:
        return f"<{self._decorator} {self.name}({', '.join(parameter.name for parameter in self.parameters)})>"

    def resources_for(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """Return the resources that it declares for a task.

        Raises:
            RewardDefinitionError: its ``resources`` function failed for this task.
            UsageError: it runs in a separate process and cannot be pickled.
        """
        if self.process:
            _ = self.process_spec  # raises before the rollout rather than after it
        return super().resources_for(task)

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The task fields that it and its parts require."""
        own = [
            one.name
            for one in self.parameters
            if one.source is not ParameterSource.CONTEXT
            and one.default is MISSING
            and one.name not in self.injectable_names
        ]
        return tuple(dict.fromkeys([*own, *getattr(self.function, "task_fields", ())]))

    @property
    def _shows_record(self) -> bool:
        """Whether it gets mutable parts of the record. They are copied, so that it cannot change the record."""
        return any(one.source is ParameterSource.MODEL_OR_ROLLOUT and one.name in _OF_RECORD for one in self.parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "process_spec"}  # it refers back

    @cached_property
    def process_spec(self) -> RewardProcessSpec:
        """The spec of its processes.

        Raises:
            UsageError: it cannot be pickled. The message names the part that cannot.
        """
        assert self.timeout_s is not None  # checked by `make_reward`
        return reward_process(self, timeout_s=self.timeout_s, workers=self.workers, memory=self.memory, env=self.env)

    async def _call(self, given: Mapping[str, Any], context: Context) -> Any:
        """Call the function and return its result. Its exceptions become typed errors."""
        arguments = {one.name: self._value(one, given, context) for one in self.parameters}
        try:
            if self.process:
                return await score_in_process(self.process_spec, arguments, context)
            return await call_user_function(self.function, arguments, timeout_s=self.timeout_s, context=context)
        except FunctionTimeout:
            raise RewardError(f"The reward {self.name!r} gave no score within {self.timeout_s:g} s.") from None
        except FunctionFailed as failed:
            error = failed.error
            if isinstance(error, AgentFlyError) and not error.by_policy:
                raise error from error.__cause__
            message = truncate_middle(describe_error(error), MAX_ECHO_CHARS)
            raise RewardError(f"The reward {self.name!r} failed with {message}{_cure_of(error)}") from error

    def _value(self, parameter: Parameter, given: Mapping[str, Any], context: Context) -> Any:
        if parameter.source is ParameterSource.CONTEXT:
            return context
        if parameter.source is ParameterSource.MODEL_OR_ROLLOUT and parameter.name in given:
            return given[parameter.name]
        try:
            return task_field(parameter.name, context, parameter.default)
        except KeyError as error:
            raise RewardDefinitionError(
                f"The reward {self.name!r} asks for {parameter.name!r}, but {error.args[0]}. A {self._decorator} can "
                f"ask for 'context', {', '.join(map(repr, given))} and the fields of its task. Rename the parameter, "
                f"give it a default, or add the field to the tasks."
            ) from None


def make_reward(
    kind: type[F],
    function: Callable[..., Any],
    names: Mapping[str, Any],
    *,
    name: str | None,
    timeout_s: float | None,
    resources: DeclaredResources,
    process: bool,
    workers: int | None,
    memory: int | str,
    env: EnvironmentVariables,
    **others: Any,
) -> F:
    """Make a reward from a function, on behalf of its decorator.

    Raises:
        RewardDefinitionError: the function cannot become a reward.
    """
    name = name or function_name(function)
    if isinstance(function, (RewardFunction, type)) or not callable(function):
        raise RewardDefinitionError(f"{name!r} is not a function. Put @{kind._decorator}, once, on a function.")
    if not isinstance(name, str):
        raise RewardDefinitionError(f"@{kind._decorator}(name={name!r:.100}): it must be a text, or None.")
    if timeout_s is not None and not is_duration(timeout_s):
        raise RewardDefinitionError(
            f"The reward {name!r} has timeout_s={timeout_s!r}; it must be a finite number of seconds above 0, without "
            "quotes, or None."
        )
    try:
        parameters, resources = read_parameters(function, names), validate_resources(resources)
    except ValueError as error:
        raise RewardDefinitionError(f"{name!r} cannot become a reward: {error}") from None
    if process:
        _require_process(name, parameters, timeout_s, workers, memory, env)
    elif workers is not None or memory or env:
        raise RewardDefinitionError(
            f"The reward {name!r} has workers=, memory= or env=, which are of processes, but process=True is not set."
        )
    return kind(function, name, parameters, timeout_s, process, workers, memory, env, resources=resources, **others)


def _require_process(
    name: str,
    parameters: tuple[Parameter, ...],
    timeout_s: float | None,
    workers: int | None,
    memory: int | str,
    env: EnvironmentVariables,
) -> None:
    if timeout_s is None:
        raise RewardDefinitionError(
            f"The reward {name!r} has process=True, so that it can be killed, but nothing says when. Add timeout_s=…."
        )
    if any(parameter.source is ParameterSource.CONTEXT for parameter in parameters):
        raise RewardDefinitionError(
            f"The reward {name!r} has process=True, but asks for the context, which cannot travel to another process. "
            "Leave one of them out: what is asked of a resource is bounded by the resource's own time limits."
        )
    try:
        RewardProcessSpec(
            factory=dict, runs="process", capacity=1 if workers is None else workers, memory=memory, env=env
        )
    except ConfigError as error:
        cure = str(error).partition(": ")[2]
        raise RewardDefinitionError(f"The reward {name!r} has workers={workers!r}, memory={memory!r}: {cure}") from None


def _cure_of(error: BaseException) -> str:
    if not (isinstance(error, AgentFlyError) and error.by_policy):
        return ""
    kind = "ToolError" if isinstance(error, ToolError) else type(error).__name__
    return (
        "\nThe trajectory stays unscored. The policy may have caused this: "
        f"catch {kind} in the reward and give a score."
    )

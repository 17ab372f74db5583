"""Reward: what scores a finished rollout, made from a function by `@reward`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.function import UserFunction, name_of
from agentfly.agents.invocation import FunctionFailed, Overrun, invoke
from agentfly.agents.needs import Needs, checked_needs, needs_for
from agentfly.agents.parameters import Parameter, Source, field_of_task, names_at, read_parameters
from agentfly.contexts.context import Context
from agentfly.errors import AgentFlyError, RewardDefinitionError, RewardError, ToolError, say
from agentfly.resources.spec import ResourceSpec
from agentfly.task import Task
from agentfly.trajectory import Trajectory

_CURE = "Return a float, a RewardResult, or a dict with the key 'reward'; raise an exception if there is no score."

_FROM_TRAJECTORY: dict[str, Callable[[Trajectory], Any]] = {
    "response": lambda trajectory: trajectory.response,
    "trajectory": lambda trajectory: trajectory,
    "task": lambda trajectory: trajectory.task,
    "prompt": lambda trajectory: trajectory.task.prompt,
}


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score and further numbers that explain it.

    Attributes:
        reward: the score.
        metrics: further numbers, by name; they are averaged over a batch and shown, and never trained on.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Reward(UserFunction):
    """What scores a finished rollout. Made by `@reward`; still callable as the function it was made from.

    Attributes:
        function: the function.
        name: its name, for messages and records.
        parameters: what it asks for.
        timeout_s: seconds that a score may take, waiting for resources not counted; None for any time.
    """

    parameters: tuple[Parameter, ...]
    timeout_s: float | None = None

    def __repr__(self) -> str:
        return f"<reward {self.name}({', '.join(parameter.name for parameter in self.parameters)})>"

    def needs(self, task: Task) -> tuple[ResourceSpec[Any], ...]:
        """What the reward has declared that it needs for a task.

        Raises:
            RewardDefinitionError: the function that says so failed for this task.
        """
        try:
            return needs_for(self.resources, task)
        except ValueError as error:
            raise RewardDefinitionError(f"The reward {self.name!r}: {error}.") from error.__cause__

    async def score(self, trajectory: Trajectory, context: Context) -> RewardResult:
        """Score a finished rollout. Whatever this raises leaves the trajectory unscored; nothing becomes a zero.

        Raises:
            RewardDefinitionError: the function asks for a field that the task does not have, or returned no score.
            RewardError: the function failed, which is the cause, or took longer than ``timeout_s``. That is so
                even if the policy may have caused it, for instance because it did not write a file: only the function
                knows what that is worth, so it has to catch the failure and give the score.
            AgentFlyError: a typed failure of something the function used, for instance of a resource.
        """
        arguments = {one.name: self._value(one, trajectory, context) for one in self.parameters}
        try:
            value = await invoke(self.function, arguments, timeout_s=self.timeout_s, context=context)
        except Overrun:
            raise RewardError(f"The reward {self.name!r} gave no score within {self.timeout_s:g} s.") from None
        except FunctionFailed as failed:
            error = failed.error
            if isinstance(error, AgentFlyError) and not error.by_policy:
                raise error from error.__cause__
            message = excerpt(say(error), ECHO_CHARS)
            raise RewardError(f"The reward {self.name!r} failed with {message}{_cure_of(error)}") from error
        return self._result(value)

    def _value(self, parameter: Parameter, trajectory: Trajectory, context: Context) -> Any:
        if parameter.source is Source.CONTEXT:
            return context
        if parameter.source is Source.CALLER and parameter.name in _FROM_TRAJECTORY:
            return _FROM_TRAJECTORY[parameter.name](trajectory)
        try:
            return field_of_task(parameter.name, context, parameter.default)
        except KeyError as error:
            raise RewardDefinitionError(
                f"The reward {self.name!r} asks for {parameter.name!r}, but {error.args[0]}. A reward can ask for "
                f"'context', {', '.join(map(repr, _FROM_TRAJECTORY))} and the fields of its task. Rename the "
                "parameter, give it a default, or add the field to the tasks."
            ) from None

    def _result(self, value: Any) -> RewardResult:
        if isinstance(value, RewardResult):
            return self._checked(value.reward, value.metrics)
        if isinstance(value, Mapping):
            metrics = {name: number for name, number in value.items() if name != "reward"}
            if "reward" not in value:
                raise RewardDefinitionError(
                    f"The reward {self.name!r} returned a dict without the key 'reward', only {sorted(metrics)}. "
                    f"{_CURE}"
                )
            return self._checked(value["reward"], metrics)
        return self._checked(value, {})

    def _checked(self, score: Any, metrics: Mapping[str, Any]) -> RewardResult:
        if not _is_finite(score):
            found = "None" if score is None else f"{type(score).__name__} {excerpt(repr(score), ECHO_CHARS // 8)}"
            raise RewardDefinitionError(f"The reward {self.name!r} returned {found}, which is not a score. {_CURE}")
        for name, number in metrics.items():
            if not _is_finite(number):
                raise RewardDefinitionError(
                    f"The reward {self.name!r} returned the metric {name!r} as {number!r}, which is no finite number. "
                    "Leave it out where it has no value."
                )
        return RewardResult(float(score), {str(name): float(number) for name, number in metrics.items()})


@overload
def reward(function: Callable[..., Any], /) -> Reward: ...


@overload
def reward(
    *, name: str | None = None, timeout_s: float | None = None, resources: Needs = ()
) -> Callable[[Callable[..., Any]], Reward]: ...


def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    resources: Needs = (),
) -> Reward | Callable[[Callable[..., Any]], Reward]:
    """Make a reward of a function: ``@reward``, or ``@reward(timeout_s=30)``.

    The function asks for what it needs by the names of its parameters: ``response`` (the text of the last turn),
    ``trajectory``, ``task``, ``prompt``, ``context`` (or any name with the type `Context`), and any field of the task.
    It returns a number, a `RewardResult`, or a dict whose key ``reward`` holds the score and whose other keys hold
    metrics. Raising an exception leaves the trajectory unscored, and counts as a failure of infrastructure: what the
    policy can cause, for instance a `ToolError` because it did not write a file, is to be caught and given a score.

    Args:
        function: a sync or async function. A sync one runs on a thread, so that it never holds up rollouts.
        name: its name, for messages and records; the function's name if it is not given.
        timeout_s: seconds that a score may take, waiting for resources not counted; None for any time.
        resources: specs of what the reward acquires with scope ``rollout``, or a function from the task to them; got
            together with what the tools declare.

    Raises:
        RewardDefinitionError: the function cannot become a reward.
    """
    if function is not None:
        return _make(function, names_at(1), name, timeout_s, resources)

    def decorate(function: Callable[..., Any]) -> Reward:
        return _make(function, names_at(1), name, timeout_s, resources)

    return decorate


def _make(
    function: Callable[..., Any], names: Mapping[str, Any], name: str | None, timeout_s: float | None, resources: Needs
) -> Reward:
    name = name or name_of(function)
    if isinstance(function, (Reward, type)) or not callable(function):
        raise RewardDefinitionError(f"{name!r} is not a function. Put @reward, once, on a function.")
    if timeout_s is not None and not timeout_s > 0:
        raise RewardDefinitionError(f"The reward {name!r} has timeout_s={timeout_s}; it must be above 0, or None.")
    try:
        parameters, resources = read_parameters(function, names), checked_needs(resources)
    except ValueError as error:
        raise RewardDefinitionError(f"{name!r} cannot become a reward: {error}") from None
    return Reward(function, name, parameters, timeout_s, resources=resources)


def _cure_of(error: BaseException) -> str:
    if not (isinstance(error, AgentFlyError) and error.by_policy):
        return ""
    kind = "ToolError" if isinstance(error, ToolError) else type(error).__name__
    return (
        "\nThe trajectory stays unscored. The policy may have caused this: "
        f"catch {kind} in the reward and give a score."
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


@reward
def tool_rewards(trajectory: Trajectory) -> float:
    """The sum of what the tools said their calls were worth; 0 if they said nothing."""
    return sum_of_tool_rewards(trajectory) or 0.0


def sum_of_tool_rewards(trajectory: Trajectory) -> float | None:
    """The same sum; None if they said nothing."""
    said = [result.reward for turn in trajectory.turns for result in turn.results if result.reward is not None]
    return float(sum(said)) if said else None

"""Reward: scores a finished rollout. `@reward` makes one from a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from agentfly.agents.reward_function import RewardFunction, make_reward
from agentfly.agents.reward_result import RewardResult, parse_reward_result, sum_known
from agentfly.agents.user_function import DeclaredResources, caller_locals
from agentfly.contexts.context import Context
from agentfly.core.async_tasks import gather_or_raise
from agentfly.core.errors import RewardDefinitionError
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.resources.spec import EnvironmentVariables


@dataclass(frozen=True, eq=False, repr=False)
class Reward(RewardFunction):
    """A reward that scores a finished rollout. Made by `@reward`; still callable as the function it was made from.

    Attributes:
        per_turn: whether the function is called once for each turn, and the score is the sum.
    """

    per_turn: bool = False

    _decorator: ClassVar[str] = "reward"
    injectable_names: ClassVar[tuple[str, ...]] = ("response", "trajectory", "task", "prompt", "turn")

    async def score(self, trajectory: Trajectory, context: Context) -> RewardResult:
        """Score a finished rollout. An exception leaves the trajectory unscored, so no failure becomes a score of zero.

        Raises:
            RewardDefinitionError: the function requires a field that the task does not have, or returned no score.
            RewardError: the function raised, which is the cause, or took longer than ``timeout_s``. This includes
                failures that the policy may have caused, for instance a missing file. The function has to catch those
                and return a score, because only it knows their worth.
            UsageError: the function runs in a separate process and cannot be pickled.
            AgentFlyError: a typed failure of something that the function used, for instance of a resource.
        """
        shown = trajectory.copy() if self._shows_record else trajectory
        given = {
            "response": trajectory.response,
            "trajectory": shown,
            "task": shown.task,
            "prompt": shown.task.prompt,
        }
        if not self.per_turn:
            return parse_reward_result(await self._call(given, context), self.name, len(trajectory.turns))
        acts = [turn for turn in trajectory.turns if turn.kind == "act"]
        values = iter(
            await gather_or_raise(self._call({**given, "turn": turn}, context.timed_apart()) for turn in acts)
        )
        return self._of_turns([next(values) if turn.kind == "act" else None for turn in trajectory.turns])

    def _of_turns(self, values: Sequence[Any]) -> RewardResult:
        """Combine the values of all turns into one score."""
        results = [None if value is None else parse_reward_result(value, self.name, turns=0) for value in values]
        rewards = [None if result is None else result.reward for result in results]
        total = sum_known(rewards)
        if total is None:
            raise RewardDefinitionError(
                f"The reward {self.name!r} returned None for each of the {len(values)} turns, so there is no score. "
                "Return a float for at least one of them."
            )
        metrics: dict[str, list[float]] = {}
        for result in results:
            for name, number in result.metrics.items() if result is not None else ():
                metrics.setdefault(name, []).append(number)
        means = {name: math.fsum(numbers) / len(numbers) for name, numbers in metrics.items()}
        return RewardResult(total, means, rewards)


@overload
def reward(function: Callable[..., Any], /) -> Reward: ...


@overload
def reward(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    resources: DeclaredResources = (),
    per_turn: bool = False,
    process: bool = False,
    workers: int | None = None,
    memory: int | str = 0,
    env: EnvironmentVariables = (),
) -> Callable[[Callable[..., Any]], Reward]: ...


def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    resources: DeclaredResources = (),
    per_turn: bool = False,
    process: bool = False,
    workers: int | None = None,
    memory: int | str = 0,
    env: EnvironmentVariables = (),
) -> Reward | Callable[[Callable[..., Any]], Reward]:
    """Make a reward from a function: ``@reward``, or ``@reward(timeout_s=30)``.

    The names of the function's parameters select its arguments: ``response`` (the visible text of the last turn),
    ``trajectory``, ``task``, ``prompt``, ``context`` (or any name with the type `Context`), and any field of the task.
    The function returns a number, a `RewardResult`, or a dict with the score under ``reward`` and metrics under its
    other keys. An exception leaves the trajectory unscored and counts as an infrastructure failure. Catch failures that
    the policy can cause, for instance a `ToolError` for a missing file, and return a score.

    Args:
        function: a sync or async function. A sync one runs on a thread, so that it does not block rollouts.
        name: its name in messages and records; by default the function's name.
        timeout_s: time limit of a score in seconds, without waiting for resources; None for no limit.
        resources: specs that the reward acquires with scope ``rollout``, or a function from the task to them. They are
            acquired together with those that the tools declare.
        per_turn: call the function once for each turn, concurrently, with the `Turn` as the parameter ``turn``. It may
            return None for a turn without a value. The score is the sum.
        process: run the function in the main thread of a separate process, which is killed after ``timeout_s``. The
            function cannot get the context.
        workers: maximum number of such processes; by default one per processor.
        memory: memory limit of such a process with its children, for instance ``"1GiB"``; 0 for no limit.
        env: environment variables of such a process, as a mapping or as pairs. It inherits only those that programs
            need to run, so API keys must be given here.

    Raises:
        RewardDefinitionError: the function cannot become a reward.
    """
    settings: dict[str, Any] = {
        "name": name,
        "timeout_s": timeout_s,
        "resources": resources,
        "per_turn": per_turn,
        "process": process,
        "workers": workers,
        "memory": memory,
        "env": env,
    }
    if function is not None:
        return make_reward(Reward, function, caller_locals(1), **settings)

    def decorate(function: Callable[..., Any]) -> Reward:
        return make_reward(Reward, function, caller_locals(1), **settings)

    return decorate


@reward
def tool_rewards(trajectory: Trajectory) -> float:
    """The sum of the rewards that the tools gave for their calls; 0 if they gave none."""
    return sum_of_tool_rewards(trajectory.turns) or 0.0


def sum_of_tool_rewards(turns: Sequence[Turn]) -> float | None:
    """Return the sum of the tools' rewards in some turns; None if there are none."""
    return sum_known([result.reward for turn in turns for result in turn.tool_results])

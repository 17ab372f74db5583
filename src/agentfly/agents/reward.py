"""Reward: what scores a finished rollout, made from a function by `@reward`."""

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
    """What scores a finished rollout. Made by `@reward`; still callable as the function it was made from.

    Attributes:
        per_turn: whether the function is called once for each turn, and the score is the sum.
    """

    per_turn: bool = False

    _decorator: ClassVar[str] = "reward"
    injectable_names: ClassVar[tuple[str, ...]] = ("response", "trajectory", "task", "prompt", "turn")

    async def score(self, trajectory: Trajectory, context: Context) -> RewardResult:
        """Score a finished rollout. Whatever this raises leaves the trajectory unscored; nothing becomes a zero.

        Raises:
            RewardDefinitionError: the function asks for a field that the task does not have, or returned no score.
            RewardError: the function failed, which is the cause, or took longer than ``timeout_s``. That is so
                even if the policy may have caused it, for instance because it did not write a file: only the function
                knows what that is worth, so it has to catch the failure and give the score.
            UsageError: the function is to run in a process of its own, and cannot travel there.
            AgentFlyError: a typed failure of something the function used, for instance of a resource.
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
        """The score that one value for each turn makes."""
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
    """Make a reward of a function: ``@reward``, or ``@reward(timeout_s=30)``.

    The function asks for what it needs by the names of its parameters: ``response`` (what was said in the last turn,
    without its thoughts), ``trajectory``, ``task``, ``prompt``, ``context`` (or any name with the type `Context`), and
    any field of the task. It returns a number, a `RewardResult`, or a dict whose key ``reward`` holds the score and
    whose other keys hold metrics. Raising an exception leaves the trajectory unscored, and counts as a failure of
    infrastructure: what the policy can cause, for instance a `ToolError` because it did not write a file, is to be
    caught and given a score.

    Args:
        function: a sync or async function. A sync one runs on a thread, so that it never holds up rollouts.
        name: its name, for messages and records; the function's name if it is not given.
        timeout_s: seconds that a score may take, waiting for resources not counted; None for any time.
        resources: specs of what the reward acquires with scope ``rollout``, or a function from the task to them; got
            together with what the tools declare.
        per_turn: call the function once for each turn, all turns at a time, with the `Turn` as the further parameter
            ``turn``. It may return None for a turn of which nothing can be said. The score is the sum.
        process: run the function in a process of its own, as its main thread. Where it takes longer than
            ``timeout_s``, whatever it does, the process is killed. The function cannot ask for the context.
        workers: how many such processes there are at most; one for each processor if not given.
        memory: what such a process may use, with all that it starts, for instance ``"1GiB"``; 0 for any amount.
        env: environment variables of such a process, as a mapping or as pairs. Of this process's it has only what
            programs need in order to run, so that no key of an API is in it unless it is given here.

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
    """The sum of what the tools said their calls were worth; 0 if they said nothing."""
    return sum_of_tool_rewards(trajectory.turns) or 0.0


def sum_of_tool_rewards(turns: Sequence[Turn]) -> float | None:
    """What the tools said that the calls of some turns were worth, summed; None if they said nothing."""
    return sum_known([result.reward for turn in turns for result in turn.results])

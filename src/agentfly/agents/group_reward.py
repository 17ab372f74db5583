"""GroupReward: scores all attempts at a task together. `@group_reward` makes one from a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from agentfly.agents.reward import Reward
from agentfly.agents.reward_function import RewardFunction, make_reward
from agentfly.agents.reward_result import RewardResult, as_list, parse_reward_result
from agentfly.agents.user_function import caller_locals, function_name
from agentfly.contexts.context import Context
from agentfly.core.errors import RewardDefinitionError, UsageError, type_of
from agentfly.core.trajectory import Trajectory
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.resources.spec import EnvironmentVariables

ScoreOutcome = RewardResult | Exception | None
"""Result of a group reward for one attempt: a score, the error in the returned value, or None for no score."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupReward(RewardFunction):
    """A reward that scores all attempts at a task together. Made by `@group_reward`; still callable as its function.

    Attributes:
        after: scores each attempt first, while its leases are still held.
    """

    after: Reward | None = None

    _decorator: ClassVar[str] = "group_reward"
    injectable_names: ClassVar[tuple[str, ...]] = ("trajectories", "responses", "task", "prompt")

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The task fields that it and `after` require."""
        return tuple(dict.fromkeys([*super().task_fields, *(self.after.task_fields if self.after is not None else ())]))

    async def score(self, trajectories: Sequence[Trajectory], context: Context) -> list[ScoreOutcome]:
        """Score the finished, valid attempts of a group.

        Returns:
            One outcome for each trajectory, in order. An attempt without a score does not affect the others.

        Raises:
            RewardDefinitionError: the function did not return a list of the right length, or requires a field that the
                task does not have.
            RewardError, UsageError, AgentFlyError: as in `Reward.score`.
        """
        shown = [one.copy() for one in trajectories] if self._shows_record else list(trajectories)
        task = shown[0].task
        given = {
            "trajectories": shown,
            "responses": [trajectory.response for trajectory in trajectories],
            "task": task,
            "prompt": task.prompt,
        }
        value = await self._call(given, context)
        scores = as_list(value)
        if scores is None or len(scores) != len(trajectories):
            found = truncate_middle(repr(value), MAX_ECHO_CHARS // 8) if scores is None else f"{len(scores)} scores"
            raise RewardDefinitionError(
                f"The group reward {self.name!r} was given {len(trajectories)} trajectories and returned {found}. "
                "Return a list with one score for each of them, None where there is none."
            )
        return [self._outcome(score, one) for score, one in zip(scores, trajectories, strict=True)]

    def _outcome(self, score: Any, trajectory: Trajectory) -> ScoreOutcome:
        if score is None:
            return None
        try:
            return parse_reward_result(score, self.name, len(trajectory.turns))
        except Exception as error:  # the returned object's own code may raise too
            return error


AnyReward = Reward | GroupReward
"""A reward for single rollouts, or for all attempts at a task together."""


def require_reward(reward: object) -> None:
    """Raise unless ``reward`` is a reward; a common mistake is a function without its decorator.

    Raises:
        UsageError: it is not a reward.
    """
    if not isinstance(reward, AnyReward):
        what = f"The function {function_name(reward)}" if callable(reward) else f"What was given, {type_of(reward)},"
        raise UsageError(f"{what} is not a reward. Put @reward, or @group_reward, above the function that scores.")


@overload
def group_reward(function: Callable[..., Any], /) -> GroupReward: ...


@overload
def group_reward(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    after: Reward | None = None,
    process: bool = False,
    workers: int | None = None,
    memory: int | str = 0,
    env: EnvironmentVariables = (),
) -> Callable[[Callable[..., Any]], GroupReward]: ...


def group_reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    after: Reward | None = None,
    process: bool = False,
    workers: int | None = None,
    memory: int | str = 0,
    env: EnvironmentVariables = (),
) -> GroupReward | Callable[[Callable[..., Any]], GroupReward]:
    """Make a reward from a function that sees all attempts at a task, for instance to rank them: ``@group_reward``.

    The function is called once, when all attempts of the group have ended. The names of its parameters select its
    arguments: ``trajectories`` (a list, in the order of the attempts), ``responses`` (the texts of their last turns),
    ``task``, ``prompt``, ``context``, and any field of the task. It returns a list with one score for each trajectory:
    a number, a `RewardResult`, a dict as in `reward`, or None for no score.

    Attempts that failed because of infrastructure, were cancelled or had no turn are not in ``trajectories``. They stay
    unscored.

    The attempts' own resources have been released by then. The context acquires shared resources (``scope="global"``)
    or new ones for this call (``scope="call"``, `Context.lease`).

    Args:
        function: a sync or async function.
        name: its name in messages and records; by default the function's name.
        timeout_s: time limit per group in seconds, without waiting for resources; None for no limit.
        after: a reward that scores each attempt as it ends, while its resources are still held. Its scores are the
            rewards of the trajectories that the function gets, and a metric under its name. The function's result is
            the final score. An attempt without a score from ``after`` is left out of the group.
        process, workers, memory, env: as in `reward`.

    Raises:
        RewardDefinitionError: the function cannot become a group reward.
    """
    if after is not None and not isinstance(after, Reward):
        raise RewardDefinitionError(
            f"@group_reward(after={after!r}): what scores each attempt first is a function with @reward above it."
        )
    settings: dict[str, Any] = {
        "name": name,
        "timeout_s": timeout_s,
        "resources": after.resources_for if after is not None else (),
        "after": after,
        "process": process,
        "workers": workers,
        "memory": memory,
        "env": env,
    }
    if function is not None:
        return make_reward(GroupReward, function, caller_locals(1), **settings)

    def decorate(function: Callable[..., Any]) -> GroupReward:
        return make_reward(GroupReward, function, caller_locals(1), **settings)

    return decorate

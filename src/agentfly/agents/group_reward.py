"""GroupReward: what scores all attempts at a task together, made from a function by `@group_reward`."""

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
from agentfly.resources.variables import EnvironmentVariables

ScoreOutcome = RewardResult | Exception | None
"""What a group reward made of one attempt: its score, why what it returned is none, or nothing to say."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupReward(RewardFunction):
    """What scores all attempts at a task together. Made by `@group_reward`; still callable as its function.

    Attributes:
        after: scores each attempt first, while what it leased is still there.
    """

    after: Reward | None = None

    _decorator: ClassVar[str] = "group_reward"
    injectable_names: ClassVar[tuple[str, ...]] = ("trajectories", "responses", "task", "prompt")

    @property
    def task_fields(self) -> tuple[str, ...]:
        """The fields that it asks every task for, those of what comes first included."""
        return tuple(dict.fromkeys([*super().task_fields, *(self.after.task_fields if self.after is not None else ())]))

    async def score(self, trajectories: Sequence[Trajectory], context: Context) -> list[ScoreOutcome]:
        """Score the attempts of a group, each of which has ended and is sound.

        Returns:
            What came of each trajectory, in their order. One that got no score takes none from the others.

        Raises:
            RewardDefinitionError: the function returned no list, or one of another length, so that it is not known
                whose the scores are; or it asks for a field that the task does not have.
            RewardError, UsageError, AgentFlyError: as of `Reward.score`.
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
        except Exception as error:  # also of what was returned, when it is looked at
            return error


AnyReward = Reward | GroupReward
"""Whatever scores rollouts: one by one, or all attempts at a task together."""


def require_reward(reward: object) -> None:
    """Raise unless ``reward`` is one: a function is easily given without its decorator.

    Raises:
        UsageError: it is something else.
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
    """Make a reward of a function that sees all attempts at a task: ``@group_reward``, for instance to rank them.

    It is called once, when all attempts of the group have ended, with what it asks for by the names of its parameters:
    ``trajectories`` (a list, in the order of the attempts), ``responses`` (the texts of their last turns), ``task``,
    ``prompt``, ``context``, and any field of the task. It returns a list with one score for each trajectory, each a
    number, a `RewardResult` or a dict as of `reward`, or None where there is nothing to say.

    Attempts that infrastructure spoiled, that were cancelled or that had no turn are not among the trajectories: they
    stay unscored, and no score can go to the wrong attempt.

    The attempts' own resources have been given back by then. What the context acquires is shared (``scope="global"``)
    or new, for this call (``scope="call"``, `Context.lease`).

    Args:
        function: a sync or async function.
        name: its name, for messages and records; the function's name if it is not given.
        timeout_s: seconds that it may take for a group, waiting for resources not counted; None for any time.
        after: scores each attempt as it ends, while what the agent left is still there. Its scores are the rewards of
            the trajectories that the function is given, and a metric under its name; what the function returns is the
            score. An attempt that it gives no score is none of the group.
        process, workers, memory, env: as of `reward`.

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

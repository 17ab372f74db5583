"""Group rewards: they score all attempts at a task together."""

from __future__ import annotations

from typing import Any, cast

import pytest

from agentfly.agents.group_reward import GroupReward, group_reward
from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.core.errors import RewardDefinitionError, RewardError
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory, Turn

TASK = Task("Say something short.", {"answer": "b", "level": 2})


@pytest.fixture
def attempts() -> list[Trajectory]:
    """Two finished attempts that answered "a" and "b"."""
    return [
        Trajectory(f"r.{number}", "r", TASK, number, turns=[Turn(0, 0, 0, 1, text, ended_by_model=True)])
        for number, text in enumerate("ab")
    ]


@pytest.fixture
async def group_context(attempts: list[Trajectory]) -> Context:
    return Context(Trajectory("r", "r", TASK), cast("Any", None), ended=True)


def returning(value: Any) -> GroupReward:
    @group_reward(name="ranked")
    def ranked() -> Any:
        return value

    return ranked


async def test_a_group_reward_gets_what_it_asks_for_by_name(attempts: list[Trajectory], group_context: Context) -> None:
    asked: dict[str, Any] = {}

    @group_reward
    async def look(trajectories, responses, task, prompt, context, answer, colour="red"):
        asked.update(locals())
        return [1.0, 0.0]

    assert await look.score(attempts, group_context) == [RewardResult(1.0), RewardResult(0.0)]
    expected = {
        "trajectories": attempts,
        "responses": ["a", "b"],
        "task": TASK,
        "prompt": TASK.prompt,
        "context": group_context,
        "answer": "b",
        "colour": "red",
    }
    assert {name: asked[name] for name in expected} == expected


async def test_one_attempt_without_a_score_takes_none_from_the_others(
    attempts: list[Trajectory], group_context: Context
) -> None:
    assert await returning([None, {"reward": 1, "wins": 3}]).score(attempts, group_context) == [
        None,
        RewardResult(1.0, {"wins": 3.0}),
    ]
    spoiled, sound = await returning((float("nan"), 0)).score(attempts, group_context)
    assert isinstance(spoiled, RewardDefinitionError)
    assert "returned float nan" in str(spoiled)
    assert sound == RewardResult(0.0)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ([1.0], "given 2 trajectories and returned 1 scores"),
        ([1.0, 2.0, 3.0], "returned 3 scores"),
        (0.5, "returned 0.5"),
        (None, "returned None"),
        ("ab", "returned 'ab'"),
        ({"a": 1.0, "b": 0.0}, "returned {'a': 1.0, 'b': 0.0}"),
    ],
)
async def test_scores_that_cannot_be_told_apart_are_refused_together(
    returned: Any, found: str, attempts: list[Trajectory], group_context: Context
) -> None:
    with pytest.raises(RewardDefinitionError, match=f"'ranked' was .*{found}.*one score for each of them"):
        await returning(returned).score(attempts, group_context)


async def test_a_group_reward_that_fails_or_asks_for_what_is_not_there_says_so(
    attempts: list[Trajectory], group_context: Context
) -> None:
    @group_reward
    def failing() -> list[float]:
        raise OSError("judge unreachable")

    @group_reward
    def asking(response: str) -> list[float]:
        return [1.0, 1.0]

    with pytest.raises(RewardError, match="'failing' failed with OSError: judge unreachable"):
        await failing.score(attempts, group_context)
    with pytest.raises(
        RewardDefinitionError, match="A group_reward can ask for 'context', 'trajectories', 'responses'"
    ):
        await asking.score(attempts, group_context)


def test_a_group_reward_declares_what_the_reward_before_it_needs() -> None:
    first = reward(resources=lambda task: [])(lambda response: 1.0)
    assert group_reward(after=first)(lambda responses: [1.0]).resources_for(TASK) == ()


def test_what_cannot_come_first_is_refused_with_the_cure() -> None:
    with pytest.raises(RewardDefinitionError, match="a function with @reward above it"):
        group_reward(after=cast("Any", len))
    with pytest.raises(RewardDefinitionError, match="Put @group_reward, once, on a function"):
        group_reward(cast("Any", returning([])))


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


@pytest.mark.parametrize("odd", [10**400, Unshowable(), {"reward": 1, "size": 10**400}, {"turn_rewards": {1.0}}])
async def test_an_odd_score_takes_none_from_the_siblings(
    attempts: list[Trajectory], group_context: Context, odd: Any
) -> None:
    first, second = await returning([odd, 0.5]).score(attempts, group_context)
    assert isinstance(first, RewardDefinitionError)
    assert second == RewardResult(0.5)


@pytest.mark.parametrize("unordered", [{0.5, 1.0}, frozenset({0.5, 1.0})])
async def test_scores_in_no_order_are_refused(
    attempts: list[Trajectory], group_context: Context, unordered: Any
) -> None:
    with pytest.raises(RewardDefinitionError, match="Return a list"):
        await returning(unordered).score(attempts, group_context)

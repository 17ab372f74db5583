"""Turn rewards: given with the score, or computed turn by turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.core.errors import RewardDefinitionError, RewardError
from agentfly.core.trajectory import Trajectory, Turn


@pytest.fixture
def three_turns(trajectory: Trajectory) -> Trajectory:
    """A trajectory of three turns that say "a", "bb" and "four"."""
    trajectory.turns[:] = [
        Turn(number, 0, 0, 1, text, ended_by_model=True) for number, text in enumerate(("a", "bb", "four"))
    ]
    return trajectory


def returning(value: Any) -> Any:
    @reward(name="judge")
    def judge() -> Any:
        return value

    return judge


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (RewardResult(1, turn_rewards=[0, None, 2]), RewardResult(1.0, {}, (0.0, None, 2.0))),
        (RewardResult(turn_rewards=[0.5, None, 2]), RewardResult(2.5, {}, (0.5, None, 2.0))),
        ({"turn_rewards": (1, 1, 1), "long": 2}, RewardResult(3.0, {"long": 2.0}, (1.0, 1.0, 1.0))),
        ({"reward": 0, "turn_rewards": [None] * 3}, RewardResult(0.0, {}, (None, None, None))),
    ],
)
async def test_turns_are_rewarded_beside_the_score_or_make_it(
    returned: Any, expected: RewardResult, three_turns: Trajectory, context: Context
) -> None:
    assert await returning(returned).score(three_turns, context) == expected


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (RewardResult(1, turn_rewards=[1, 2]), "of 3 turns, and this is 2 of them"),
        (RewardResult(1, turn_rewards=[]), "and this is 0 of them"),
        (RewardResult(1, turn_rewards="abc"), "and this is no list"),  # type: ignore[arg-type]
        (RewardResult(1, turn_rewards={0: 1.0, 1: 1.0, 2: 1.0}), "and this is no list"),  # type: ignore[arg-type]
        (RewardResult(1, turn_rewards=[1, "2", 3]), "'2' as the reward of turn 1"),  # type: ignore[list-item]
        (RewardResult(1, turn_rewards=[1, 2, float("nan")]), "nan as the reward of turn 2"),
        (RewardResult(turn_rewards=[None, None, None]), "returned None, which is not a score"),
        (RewardResult(), "returned None, which is not a score"),
        ({"turn_rewards": None}, "returned None, which is not a score"),
    ],
)
async def test_rewards_of_turns_that_do_not_fit_leave_the_whole_unscored(
    returned: Any, found: str, three_turns: Trajectory, context: Context
) -> None:
    with pytest.raises(RewardDefinitionError, match=found):
        await returning(returned).score(three_turns, context)


async def test_a_reward_per_turn_is_asked_for_each_turn_and_summed(three_turns: Trajectory, context: Context) -> None:
    @reward(per_turn=True)
    def length(turn: Turn, response: str, level: int) -> Any:
        assert response == "four"
        return None if turn.text == "a" else {"reward": len(turn.text) * level, "long": len(turn.text) > 2}

    assert await length.score(three_turns, context) == RewardResult(6.0, {"long": 0.5}, [None, 2.0, 4.0])


async def test_what_only_writes_to_memory_is_no_turn_to_reward(three_turns: Trajectory, context: Context) -> None:
    three_turns.turns[1] = replace(three_turns.turns[1], kind="memory")

    @reward(per_turn=True)
    async def one(turn: Turn) -> float:
        assert turn.kind == "act"
        return 1

    assert await one.score(three_turns, context) == RewardResult(2.0, {}, [1.0, None, 1.0])


async def test_one_turn_that_fails_leaves_the_whole_unscored(three_turns: Trajectory, context: Context) -> None:
    @reward(per_turn=True)
    def picky(turn: Turn) -> float:
        return 1 / (2 - len(turn.text))

    with pytest.raises(RewardError, match="'picky' failed with ZeroDivisionError") as failed:
        await picky.score(three_turns, context)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


async def test_nothing_said_of_any_turn_is_no_score(three_turns: Trajectory, context: Context) -> None:
    @reward(per_turn=True)
    def silent(turn: Turn) -> None:
        return None

    with pytest.raises(RewardDefinitionError, match="returned None for each of the 3 turns"):
        await silent.score(three_turns, context)

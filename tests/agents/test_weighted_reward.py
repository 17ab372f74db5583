"""Weighted sums of rewards."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import cloudpickle
import pytest

from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.weighted_reward import weighted
from agentfly.contexts.context import Context
from agentfly.core.errors import RewardDefinitionError, RewardError
from agentfly.core.trajectory import Trajectory
from agentfly.testing.fake_resource import FakeSpec


@reward
def correct(response: str, answer: str) -> dict[str, float]:
    return {"reward": 0.5, "success": 1, "tries": 3}


@reward
async def short(response: str) -> RewardResult:
    return RewardResult(2, {"success": 0, "characters": len(response)}, [4.0])


@reward
def broken() -> float:
    raise ValueError("no JSON")


@group_reward
def ranked(responses: list[str]) -> list[float]:
    return [1.0] * len(responses)


async def test_parts_are_weighed_and_stand_in_the_metrics(trajectory: Trajectory, context: Context) -> None:
    total = weighted({correct: 1, short: -0.25})
    assert await total.score(trajectory, context) == RewardResult(
        0.0,
        {"correct": 0.5, "success": 1.0, "correct/tries": 3.0, "short": 2.0, "short/characters": 4.0},
        (-1.0,),
    )
    assert total.name == "1 correct + -0.25 short"


async def test_a_sum_can_be_part_of_a_sum_and_travel(trajectory: Trajectory, context: Context) -> None:
    total = pickle.loads(cloudpickle.dumps(weighted({weighted({correct: 2.0}, name="twice"): 0.5})))
    result = await total.score(trajectory, context)
    assert (result.reward, result.metrics["twice"], result.metrics["twice/correct"]) == (0.5, 1.0, 0.5)


async def test_a_part_without_a_score_leaves_the_whole_without_one(trajectory: Trajectory, context: Context) -> None:
    with pytest.raises(RewardError, match="'broken' failed with ValueError: no JSON"):
        await weighted({correct: 1.0, broken: 0.0}).score(trajectory, context)


async def test_parts_are_computed_at_the_same_time(trajectory: Trajectory, context: Context) -> None:
    both = asyncio.Barrier(2)

    def waiting(name: str) -> Any:
        @reward(name=name, timeout_s=10)
        async def one() -> float:
            await both.wait()
            return 1.0

        return one

    assert (await weighted({waiting("a"): 1, waiting("b"): 1}).score(trajectory, context)).reward == 2.0


def test_a_sum_needs_what_its_parts_need(trajectory: Trajectory) -> None:
    box, shop = FakeSpec(name="box"), FakeSpec(name="shop")
    first = reward(name="first", resources=[box, shop])(lambda response: 1.0)
    second = reward(name="second", resources=lambda task: [shop])(lambda response: 1.0)
    assert weighted({first: 1, second: 1, correct: 1}).resources_for(trajectory.task) == (box, shop)
    assert weighted({correct: 1}).resources_for(trajectory.task) == ()


@pytest.mark.parametrize(
    ("parts", "cure"),
    [
        ({}, r"weighted\(\{correct: 1.0, short: 0.1\}\)"),
        ([correct, short], r"weighted\(\{correct: 1.0, short: 0.1\}\)"),
        ({len: 1.0}, "Put @reward above a function"),
        ({ranked: 1.0}, r"@group_reward\(after=…\)"),
        ({correct: "1"}, "the weight of 'correct' is '1'"),
        ({correct: float("nan")}, "the weight of 'correct' is nan"),
        (
            {correct: 1.0, reward(name="correct")(lambda: 1.0): 1.0},
            r"two parts are called 'correct'.*@reward\(name=…\)",
        ),
    ],
)
def test_what_cannot_be_summed_is_refused_with_the_cure(parts: Any, cure: str) -> None:
    with pytest.raises(RewardDefinitionError, match=cure):
        weighted(parts)

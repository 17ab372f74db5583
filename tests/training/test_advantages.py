"""Advantages against numbers worked by hand, and by property."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import ConfigError
from agentfly.task import Task
from agentfly.tokens import TokenSequence
from agentfly.training.advantages import ALGORITHMS, Algorithm, Evidence
from agentfly.training.advantages.outcome import by_group
from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.rows import Row, rows_from_trajectories
from agentfly.trajectory import Trajectory

GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo"]


def row(group: str, rollout: str, reward: float, mask: Sequence[int] = (0, 1, 1)) -> Row:
    length = len(mask)
    return Row(
        ids=[7] * length,
        loss_mask=mask,
        logprobs=[-0.5 if sampled else math.nan for sampled in mask],
        versions=[0 if sampled else -1 for sampled in mask],
        group_id=group,
        rollout_id=rollout,
        reward=reward,
        truncated=False,
    )


def group_of(rewards: Sequence[float], group: str = "g") -> list[Row]:
    return [row(group, f"{group}{number}", reward) for number, reward in enumerate(rewards)]


def estimate(name: str, rows: Sequence[Row]) -> list[np.ndarray]:
    return ALGORITHMS[name].estimate(Evidence(rows), AdvantageConfig()).values


def first_values(name: str, rows: Sequence[Row]) -> list[float]:
    return [float(values[0]) for values in estimate(name, rows)]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 1, 0], [0.8660254, -0.8660254, 0.8660254, -0.8660254]),
        ("dr_grpo", [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]),
        ("rloo", [1, 0, 1, 0], [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        ("rloo", [3, 0, 0], [3, -1.5, -1.5]),
        ("reinforce", [1, 0, 0.25], [1, 0, 0.25]),
    ],
)
def test_advantages_of_one_group_are_those_worked_by_hand(
    name: str, rewards: list[float], expected: list[float]
) -> None:
    assert first_values(name, group_of(rewards)) == pytest.approx(expected)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_has_advantage_zero(name: str) -> None:
    assert first_values(name, [row("a", "r1", 1.0), row("b", "r2", 5.0)]) == [0.0, 0.0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.0] * 7, [0.1] * 7, [1e6 / 3] * 3, [0.1 + 0.2, 0.3, 0.3]])
def test_equal_rewards_give_exactly_zero_whatever_rounding_leaves(name: str, rewards: list[float]) -> None:
    assert first_values(name, group_of(rewards)) == [0.0] * len(rewards)


def test_a_baseline_counts_trajectories_and_not_rows_and_never_mixes_tasks() -> None:
    rows = [
        *[row("x", "a", 1.0)] * 3,
        row("x", "b", 0.0),
        *[row("y", "c", 1.0)] * 2,
        row("y", "d", 1.0),
    ]
    assert first_values("dr_grpo", rows) == [0.5, 0.5, 0.5, -0.5, 0.0, 0.0, 0.0]


def test_every_sampled_token_of_a_trajectory_has_its_advantage_whichever_row_holds_it() -> None:
    rows = [
        row("g", "a", 1.4, (0, 1, 1, 1, 1, 0, 0)),
        row("g", "a", 1.4, (0, 0, 0, 0, 0, 1, 1)),
        row("g", "b", 0.0, (0, 1)),
    ]
    first, second, other = estimate("dr_grpo", rows)
    assert first.tolist() == pytest.approx([0.7] * 4)
    assert second.tolist() == pytest.approx([0.7] * 2)
    assert other.tolist() == pytest.approx([-0.7])


def trajectory(number: int, reward: float | None, *, sampled: int = 2) -> Trajectory:
    sequence = TokenSequence()
    sequence.append_prompt([1, 2])
    sequence.append_sampled([3] * sampled, [-0.5] * sampled, 0)
    return Trajectory(
        rollout_id=f"r{number}", group_id="g", task=Task("q"), reward=reward, sequences=[sequence.freeze()]
    )


def test_unscored_attempts_are_in_no_baseline() -> None:
    batch = rows_from_trajectories([trajectory(n, reward) for n, reward in enumerate([1.0, None, 0.0, math.nan])])
    assert [row.rollout_id for row in batch.rows] == ["r0", "r2"]
    assert first_values("dr_grpo", batch.rows) == [0.5, -0.5]
    assert batch.left_out == {"unscored": 2}


def test_a_group_without_any_score_gives_no_row() -> None:
    batch = rows_from_trajectories([trajectory(n, None) for n in range(3)])
    assert batch.rows == ()
    assert estimate("grpo", batch.rows) == []


def test_an_attempt_without_sampled_tokens_does_not_move_the_baseline() -> None:
    batch = rows_from_trajectories([trajectory(0, 100.0, sampled=0), trajectory(1, 1.0), trajectory(2, 0.0)])
    assert first_values("dr_grpo", batch.rows) == [0.5, -0.5]
    assert batch.left_out == {"no_sampled_tokens": 1}


@given(
    st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=8),
    st.sampled_from(GROUP_ESTIMATORS),
    st.floats(-5, 5, allow_nan=False),
)
def test_group_advantages_sum_to_zero_and_do_not_know_the_zero_of_the_reward(
    rewards: list[float], name: str, shift: float
) -> None:
    if 0 < np.ptp(rewards) < 1e-3:
        return
    values = first_values(name, group_of(rewards))
    assert math.isclose(sum(values), 0.0, abs_tol=1e-9)
    assert first_values(name, group_of([reward + shift for reward in rewards])) == pytest.approx(values, abs=1e-6)


def test_an_unknown_algorithm_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        ALGORITHMS["grop"]


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ConfigError, match="already"):
        ALGORITHMS.register("grpo", Algorithm(by_group(lambda rewards: rewards)))


@pytest.mark.parametrize("rewards", [[1e-300, 0.0, 0.0], [1e308, 0.0, 0.0], [1e-200, 3e-200, 2e-200]])
def test_rewards_of_any_size_give_finite_advantages_of_mean_0(rewards: list[float]) -> None:
    rows = [row("g", str(number), reward) for number, reward in enumerate(rewards)]
    values = [advantages[0] for advantages in estimate("grpo", rows)]
    assert all(math.isfinite(value) for value in values)
    assert values[0] != 0
    assert sum(values) == pytest.approx(0, abs=1e-9)

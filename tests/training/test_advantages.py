"""Advantages: values computed by hand, and properties."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Trajectory
from agentfly.resources.model_api.judge import scores_of
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages, Algorithm
from agentfly.training.advantages.outcome import group_estimator
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, RowTurn, rows_from_trajectories

GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo", "ranking"]
OUTCOME_ESTIMATORS = [*GROUP_ESTIMATORS, "reinforce", "reinforce_plus_plus_baseline"]


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
    return ALGORITHMS[name].estimate(AdvantageInputs(rows), AdvantageConfig()).values


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
        ("opo", [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]),
        ("ranking", [7, 0, 0.5], [0.5, -0.5, 0]),
        ("ranking", [3, 1, 1, 0], [0.5, 0, 0, -0.5]),
        ("ranking", [2, 2, 0], [0.25, 0.25, -0.5]),
    ],
)
def test_advantages_of_one_group_match_a_manual_calculation(
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


def test_a_difference_that_rounding_can_explain_is_none_to_any_algorithm() -> None:
    """Division by a standard deviation, and AdamW, enlarge rounding to the size of a real difference."""
    for name in judged_by_name():
        for reward in (0.0, 0.7, -1e6 / 3):
            noise = 1e-7 * max(1.0, abs(reward))
            for rewards in ([reward] * 4, [reward, reward + noise, reward, reward], [reward - noise, reward + noise]):
                values = judged_by_name()[name](rewards, reward)
                if name == "reinforce" and reward != 0:
                    assert np.concatenate(values) == pytest.approx(reward)  # it compares with 0
                else:
                    assert not np.concatenate(values).any(), (name, rewards)


def test_every_algorithm_tells_a_small_difference_from_rounding() -> None:
    for name, judged in judged_by_name().items():
        for reward in (0.0, 0.7, -1e6 / 3):
            real = 1e-5 * max(1.0, abs(reward))
            assert np.concatenate(judged([reward, reward + real, reward], reward)).any(), name


def judged_by_name() -> dict[str, Callable[[Sequence[float], float], list[np.ndarray]]]:
    """Return each algorithm as a function of a group's rewards and of the value of the critic or greedy rollout."""

    def of(name: str) -> Callable[[Sequence[float], float], list[np.ndarray]]:
        def judged(rewards: Sequence[float], expected: float) -> list[np.ndarray]:
            turns = (RowTurn(0, 1, 2, anchor="hall"), RowTurn(1, 2, 3, anchor="attic"))
            rows = [replace(one, turns=turns) for one in group_of(rewards)]
            values = [np.full(2, expected) for _ in rows]
            return judge(name, AdvantageInputs(rows, values=values, baselines={"g": expected})).values

        return judged

    return {name: of(name) for name in ALGORITHMS}


def test_a_baseline_counts_trajectories_and_not_rows_and_never_mixes_tasks() -> None:
    rows = [
        *[row("x", "a", 1.0)] * 3,
        row("x", "b", 0.0),
        *[row("y", "c", 1.0)] * 2,
        row("y", "d", 1.0),
    ]
    assert first_values("dr_grpo", rows) == [0.5, 0.5, 0.5, -0.5, 0.0, 0.0, 0.0]
    assert first_values("grpo", rows) == pytest.approx([math.sqrt(0.5)] * 3 + [-math.sqrt(0.5), 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", OUTCOME_ESTIMATORS)
def test_rows_without_a_sampled_token_move_nothing(name: str) -> None:
    others = [row("g", "b", 1.0), row("g", "c", 0.0)]
    silent, *found = estimate(name, [row("g", "a", 100.0, (0, 0)), *others])
    assert silent.shape == (0,)
    assert [values.tolist() for values in found] == [values.tolist() for values in estimate(name, others)]


def test_a_rollout_without_a_sampled_token_is_in_no_baseline() -> None:
    rows = [row("g", "a", 100.0, (0, 0)), row("g", "b", 1.0), row("g", "c", 0.0)]
    assert [values.tolist() for values in estimate("dr_grpo", rows)] == [[], [0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("name", OUTCOME_ESTIMATORS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_how_trajectories_are_laid_out_in_rows_changes_nothing(name: str, data: st.DataObject) -> None:
    """The rows in another order, and trajectories in more rows."""
    tokens = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=6))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(tokens), max_size=len(tokens)))
    whole, parts = [], []
    for number, (count, reward) in enumerate(zip(tokens, rewards, strict=True)):
        group = "xy"[number % 2]
        whole.append(row(group, str(number), reward, [0, *[1] * count]))
        cut = data.draw(st.integers(1, count))
        parts += [row(group, str(number), reward, [0, 0, *[1] * size]) for size in (cut, count - cut)]
    parts = data.draw(st.permutations(parts))
    expected = {one.rollout_id: values[0] for one, values in zip(whole, estimate(name, whole), strict=True)}
    for part, values in zip(parts, estimate(name, parts), strict=True):
        assert values.tolist() == pytest.approx([expected[part.rollout_id]] * len(part.targets), abs=1e-12)


def test_ranking_depends_only_on_the_order_of_rewards() -> None:
    responses = ["good", "bad", "best", "good"]
    scores = scores_of(responses, ["good", "bad", "best"], [2, 0, 1])
    places = [0.0, -0.5, 0.5, 0.0]
    assert first_values("ranking", group_of(scores)) == pytest.approx(places)
    assert first_values("ranking", group_of([10 * score**3 for score in scores])) == pytest.approx(places)
    assert first_values("dr_grpo", group_of(scores)) == pytest.approx(places)


def test_opo_weighs_each_attempt_by_its_sampled_tokens() -> None:
    rows = [row("g", "a", 1.0, (0, 1, 1)), row("g", "a", 1.0, (0, 1)), row("g", "b", 0.0, (0, 1))]
    # The baseline is (3 * 1 + 1 * 0) / 4.
    assert first_values("opo", rows) == [0.25, 0.25, -0.75]


def test_all_sampled_tokens_of_a_trajectory_get_its_advantage_in_every_row() -> None:
    rows = [
        row("g", "a", 1.4, (0, 1, 1, 1, 1, 0, 0)),
        row("g", "a", 1.4, (0, 0, 0, 0, 0, 1, 1)),
        row("g", "b", 0.0, (0, 1)),
    ]
    first, second, other = estimate("dr_grpo", rows)
    assert first.tolist() == pytest.approx([0.7] * 4)
    assert second.tolist() == pytest.approx([0.7] * 2)
    assert other.tolist() == pytest.approx([-0.7])


# --- from token to token ----------------------------------------------------------------------------------------------


def judge(name: str, evidence: AdvantageInputs, **config: float) -> Advantages:
    return ALGORITHMS[name].estimate(evidence, AdvantageConfig(**config))  # type: ignore[arg-type]


def turn_row(rollout: str, reward: float, turn: int, mask: Sequence[int], group: str = "g") -> Row:
    return replace(row(group, rollout, reward, mask), turns=(RowTurn(turn, 0, len(mask)),))


def test_reinforce_plus_plus_takes_the_penalties_from_each_token_on() -> None:
    rows = [row("g", "a", 1.0, (0, 1, 0, 1)), row("h", "b", 0.0, (0, 1))]
    penalties = [np.array([-0.25, -0.5]), np.array([-0.5])]
    found = judge("reinforce_plus_plus", AdvantageInputs(rows, token_rewards=penalties), discount=0.5)
    returns = np.array([-0.25 + 0.5 * 0.5, 1.0 - 0.5, -0.5])  # of mean 0 and sample variance 1/4
    assert np.concatenate(found.values).tolist() == pytest.approx((returns / 0.5).tolist())


def test_whitening_counts_tokens_so_that_a_long_trajectory_weighs_more() -> None:
    rows = [row("g", "a", 1.0, (0, 1, 1, 1)), row("h", "b", 0.0, (0, 1))]
    assert first_values("reinforce_plus_plus", rows) == pytest.approx([0.5, -1.5])  # mean 3/4, variance 1/4
    grouped = [row("g", "a", 1.0, (0, 1, 1, 1)), row("g", "b", 0.0, (0, 1))]
    assert first_values("reinforce_plus_plus_baseline", grouped) == pytest.approx([0.5, -1.5])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_makes_equal_values_and_a_single_token_zero(name: str) -> None:
    assert first_values(name, [row("g", "a", 0.1 + 0.2, (0, 1))]) == [0.0]
    assert first_values(name, [row("g", str(number), reward) for number, reward in enumerate([0.3, 0.1 + 0.2])]) == [
        0,
        0,
    ]
    assert estimate(name, []) == []


def test_remax_compares_with_the_greedy_rollout_of_the_same_task() -> None:
    rows = [row("g", "a", 1.0), row("g", "b", 0.0), row("h", "c", 1.0)]
    found = judge("remax", AdvantageInputs(rows, baselines={"g": 0.75, "h": 1.0}))
    assert [values.tolist() for values in found.values] == [[0.25, 0.25], [-0.75, -0.75], [0.0, 0.0]]
    with pytest.raises(UsageError, match="group 'h'"):
        judge("remax", AdvantageInputs(rows, baselines={"g": 0.75}))


def test_gae_looks_from_the_last_token_of_a_row_to_the_first_of_the_next_turn() -> None:
    """The later turn's row comes first in the batch; what was read between the sampled tokens takes no time."""
    rows = [turn_row("a", 1.0, 1, (0, 0, 1)), turn_row("a", 1.0, 0, (0, 1, 0, 1))]
    values = [np.array([0.5]), np.array([0.25, 0.0])]
    found = judge("gae", AdvantageInputs(rows, values=values), discount=0.5, gae_lambda=0.5)
    # Surprises in time: 0.5 * 0 - 0.25, 0.5 * 0.5 - 0, 1 - 0.5. To each comes a quarter of the next advantage.
    last, second, first = 0.5, 0.25 + 0.5 / 4, -0.25 + 0.375 / 4
    assert found.returns is not None
    assert [one.tolist() for one in found.returns] == [[last + 0.5], pytest.approx([first + 0.25, second])]
    mean, std = np.mean([first, second, last]), np.std([first, second, last], ddof=1)
    assert np.concatenate(found.values).tolist() == pytest.approx([(one - mean) / std for one in (last, first, second)])


def test_turns_of_a_subagent_stand_where_they_were_taken() -> None:
    """The agent's row holds turns 0 and 2, its subagent's turn 1: the reward comes at the end of turn 2."""
    own = replace(row("g", "a", 1.0, (0, 1, 0, 1)), turns=(RowTurn(0, 1, 2), RowTurn(2, 3, 4)))
    subagent = replace(turn_row("a", 1.0, 1, (0, 1)), agent="helper")
    found = judge("gae", AdvantageInputs([own, subagent], values=[np.zeros(2), np.zeros(1)]), discount=0.5)
    assert found.returns is not None
    assert [one.tolist() for one in found.returns] == [[0.25, 1.0], [0.5]]


def test_gae_needs_values() -> None:
    with pytest.raises(UsageError, match="critic"):
        judge("gae", AdvantageInputs([row("g", "a", 1.0)]))


# --- what is judged ---------------------------------------------------------------------------------------------------


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
    assert batch.excluded == {"unscored": 2}


def test_a_group_without_any_score_gives_no_row() -> None:
    batch = rows_from_trajectories([trajectory(n, None) for n in range(3)])
    assert batch.rows == ()
    assert estimate("grpo", batch.rows) == []


def test_an_attempt_without_sampled_tokens_does_not_move_the_baseline() -> None:
    batch = rows_from_trajectories([trajectory(0, 100.0, sampled=0), trajectory(1, 1.0), trajectory(2, 0.0)])
    assert first_values("dr_grpo", batch.rows) == [0.5, -0.5]
    assert batch.excluded == {"no_sampled_tokens": 1}


@settings(deadline=None)
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
        ALGORITHMS.register("grpo", Algorithm(group_estimator(lambda rewards: rewards)))


def test_the_names_of_the_algorithms_are_known_without_numpy() -> None:
    code = (
        "import sys; sys.modules.update(numpy=None, torch=None); "
        "from agentfly.training.config.train_config import TrainConfig; print(TrainConfig(algorithm='gigpo').algorithm)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "gigpo\n"


@pytest.mark.parametrize("rewards", [[2e-6, 0.0, 0.0], [1e308, 0.0, 0.0], [1.0, 3.0, 2.0]])
def test_rewards_of_any_size_give_finite_advantages_of_mean_0(rewards: list[float]) -> None:
    values = first_values("grpo", group_of(rewards))
    assert all(math.isfinite(value) for value in values)
    assert values[0] != 0
    assert sum(values) == pytest.approx(0, abs=1e-9)

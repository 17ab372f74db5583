"""Dynamic sampling drops groups without an advantage, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from agentfly.core.errors import ConfigError
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Turn
from agentfly.training.advantages import ALGORITHMS
from agentfly.training.batch_source import greedy_baselines, has_learning_signal
from agentfly.training.config.train_config import TrainConfig
from tests.training.made_groups import attempted


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"attempts": 2, **settings})


def judged(rewards: Iterable[float | None], greedy: float | None = None, **settings: Any) -> bool:
    """Whether a group of attempts with such rewards teaches anything; a greedy rollout samples one token as well."""
    group = attempted(0, rewards)
    if greedy is not None:
        group = dataclasses.replace(group, greedy=attempted(0, [greedy]).trajectories[0])
    return has_learning_signal(group, config(dynamic_sampling={}, **settings))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if ALGORITHMS[name].supports_dynamic_sampling])
def test_a_group_teaches_where_the_algorithm_finds_an_advantage_in_it(algorithm: str) -> None:
    judge = partial(judged, algorithm=algorithm)
    assert judge([0.0, 1.0], greedy=0.0)
    assert not judge([0.0, 1e-8], greedy=0.0)
    assert not judge([None, 0.0], greedy=0.0)
    assert not judge([None, None], greedy=0.0)
    assert judge([1.0, 1.0], greedy=0.0) == (algorithm in ("remax", "reinforce"))


def test_remax_learns_nothing_from_a_group_with_an_equal_or_missing_greedy_rollout() -> None:
    assert judged([0.25], greedy=0.5, algorithm="remax", attempts=1)
    assert not judged([0.5], greedy=0.5, algorithm="remax", attempts=1)
    assert not judged([0.5], algorithm="remax", attempts=1)


def test_a_group_of_equal_outcomes_teaches_gigpo_by_its_turns_and_others_by_the_length_of_its_answers() -> None:
    group = attempted(0, [1.0, 1.0])
    for attempt, trajectory in enumerate(group.trajectories):
        sequence = TokenSequence()
        sequence.append_prompt([1, 2])
        sequence.append_sampled([3] * (1 + 4 * attempt), [-0.5] * (1 + 4 * attempt), version=0)
        trajectory.sequences = [sequence]
        trajectory.turns = [Turn(0, 0, 2, 3, "", True, reward=float(attempt), anchor="the hall")]
    assert has_learning_signal(group, config(dynamic_sampling={}, algorithm="gigpo"))
    assert not has_learning_signal(group, config(dynamic_sampling={}, algorithm="grpo"))
    assert has_learning_signal(group, config(dynamic_sampling={}, overlong={"max_tokens": 6, "buffer_tokens": 4}))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if not ALGORITHMS[name].supports_dynamic_sampling])
def test_dynamic_sampling_is_refused_where_groups_of_equal_rewards_teach(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"dynamic_sampling with algorithm={algorithm}.* such as grpo"):
        config(dynamic_sampling={}, algorithm=algorithm)


def test_dynamic_sampling_is_refused_where_a_penalty_in_the_reward_tells_equal_attempts_apart() -> None:
    with pytest.raises(ConfigError, match=r"Set kl\.where=loss"):
        config(dynamic_sampling={}, kl={"coefficient": 0.1, "where": "reward"})


def test_a_greedy_baseline_is_less_the_penalty_on_length_as_the_rewards_that_it_is_compared_with() -> None:
    group = attempted(0, [1.0])
    group = dataclasses.replace(group, greedy=attempted(0, [1.0]).trajectories[0])
    assert greedy_baselines([group], config(overlong={"max_tokens": 2, "buffer_tokens": 2})) == {"train-0": 0.5}
    assert greedy_baselines([group], config()) == {"train-0": 1.0}
    assert not judged([1.0], greedy=1.0, algorithm="remax", attempts=1, overlong={"max_tokens": 2, "buffer_tokens": 2})

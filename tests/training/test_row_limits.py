"""Trajectories and rows beyond the length limits: the penalty on the reward, and the cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.messages import Image, PlacedImage
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Trajectory
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.batch_source import StepBatch
from agentfly.training.config.groups import AdvantageConfig, OverlongConfig
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.rollout_queue import RolloutGroup
from agentfly.training.rows import Row, RowBatch, RowTurn, apply_row_limits, cut_row, cut_rows, overlong_penalty
from agentfly.training.update import PolicyUpdater

SHAPE = OverlongConfig(max_tokens=20, buffer_tokens=8, penalty=1.0)


def row(mask: Sequence[int], rollout: str = "a", reward: float = 1.0, **others: Any) -> Row:
    return Row(
        ids=list(range(len(mask))),
        loss_mask=list(mask),
        logprobs=[-float(place) if sampled else math.nan for place, sampled in enumerate(mask)],
        versions=[place if sampled else -1 for place, sampled in enumerate(mask)],
        group_id="g",
        rollout_id=rollout,
        reward=reward,
        truncated=False,
        **others,
    )


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (12, 0.0), (13, 0.125), (16, 0.5), (19, 0.875), (20, 1.0), (500, 1.0)]
)
def test_the_penalty_rises_evenly_over_the_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, SHAPE) == penalty
    assert overlong_penalty(tokens, SHAPE.model_copy(update={"penalty": 3.0})) == 3 * penalty


def test_the_sampled_tokens_of_all_rows_of_a_trajectory_count_and_no_others() -> None:
    rows = (
        row([0] * 50 + [1] * 10),
        row([0, *[1] * 6], agent="helper"),
        row([0] * 99 + [1] * 12, rollout="b", reward=0.25),
    )
    shaped = apply_row_limits(RowBatch(rows, {}), overlong=SHAPE, max_row_tokens=None)
    assert [one.reward for one in shaped.rows] == [0.5, 0.5, 0.25]


def test_the_overlong_penalty_counts_sampled_tokens_before_truncation() -> None:
    batch = apply_row_limits(RowBatch((row([0, *[1] * 16]),), {}), overlong=SHAPE, max_row_tokens=5)
    assert [(one.reward, len(one)) for one in batch.rows] == [(0.5, 5)]


def test_a_penalty_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="Lower buffer_tokens"):
        OverlongConfig(max_tokens=4, buffer_tokens=5)


images = st.lists(st.integers(1, 3), max_size=3).map(
    lambda sizes: [PlacedImage(Image(b"png"), 4 * place, 4 * place + size) for place, size in enumerate(sizes)]
)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=12, max_size=20), images, st.integers(1, 22))
def test_all_that_is_known_of_a_row_is_cut_at_one_index(mask: list[int], images: list[PlacedImage], limit: int) -> None:
    half = len(mask) // 2
    turns = (RowTurn(0, 0, half, reward=1.0), RowTurn(3, half, len(mask), reward=2.0))
    whole = row(mask, raw_logprobs=[-float(place) for place in range(len(mask))], turns=turns, images=images)
    cut = cut_row(whole, limit)
    length = len(cut)
    assert cut.truncated == (length < len(whole))
    assert length == len(whole) or limit - 3 < length <= limit
    assert cut.raw_logprobs is not None
    for name in ("ids", "loss_mask", "versions", "raw_logprobs"):
        assert getattr(cut, name) == getattr(whole, name)[:length]
    assert cut.target_logprobs == whole.target_logprobs[: len(cut.targets)]
    assert all(image.stop <= length for image in cut.images)
    assert length == limit or length == len(whole) or any(image.start == length for image in images)
    assert [(turn.index, turn.reward) for turn in cut.turns] == [(0, 1.0), (3, 2.0)]
    assert all(turn.start <= turn.stop <= length for turn in cut.turns)
    assert [place for turn in cut.turns for place in range(turn.start, turn.stop)] == list(range(length))


def test_a_trajectory_that_is_cut_off_whole_is_counted_and_moves_no_baseline() -> None:
    rows = (row([0] * 9 + [1], "a", 100.0), row([0, 1], "b", 1.0), row([0, 1] + [0] * 9 + [1], "c", 0.0))
    batch = cut_rows(RowBatch(rows, {"unscored": 2}), 5)
    assert batch.excluded == {"unscored": 2, "cut_off": 1}
    assert [(one.rollout_id, one.truncated) for one in batch.rows] == [("b", False), ("c", True)]
    values = ALGORITHMS["dr_grpo"].estimate(AdvantageInputs(batch.rows), AdvantageConfig()).values
    assert [value.tolist() for value in values] == [[0.5], [-0.5]]


def test_a_trajectory_with_one_remaining_row_still_gets_an_advantage() -> None:
    batch = cut_rows(RowBatch((row([0] * 9 + [1]), row([0, 1, 1])), {}), 5)
    assert batch.excluded == {}
    assert [one.targets for one in batch.rows] == [[1, 2]]


def test_rewards_of_truncated_turns_count_for_earlier_turns() -> None:
    turns = (RowTurn(0, 1, 3, anchor="s", reward=0.0), RowTurn(1, 8, 9, anchor="t", reward=1.0))
    long = row([0, 1, 1, 0, 0, 0, 0, 0, 1], "a", 1.0, turns=turns)
    short = row([0, 1, 1], "b", 0.0, turns=(RowTurn(0, 1, 3, anchor="s", reward=0.0),))
    batch = cut_rows(RowBatch((long, short), {}), 5)
    config = AdvantageConfig(step_discount=0.5, divide_by_std=False)
    values = ALGORITHMS["gigpo"].estimate(AdvantageInputs(batch.rows), config).values
    assert [value.tolist() for value in values] == [[0.75, 0.75], [-0.75, -0.75]]


def attempt(number: int, sampled: int) -> Trajectory:
    sequence = TokenSequence()
    sequence.append_prompt([1, 2])
    sequence.append_sampled([3] * sampled, [-0.5] * sampled, 0)
    return Trajectory(f"r{number}", "g", Task("q"), reward=1.0, sequences=[sequence.freeze()])


def learned_from(*lengths: int, **config: Any) -> RowBatch:
    """Return the trained rows of attempts with the given numbers of sampled tokens."""
    attempts = tuple(attempt(number, sampled) for number, sampled in enumerate(lengths))
    update = PolicyUpdater(cast(Any, None), cast(Any, None), TrainConfig(**config))
    return update.make_batch(StepBatch(trained_groups=(RolloutGroup(0, attempts),)))


def test_a_step_trains_on_the_rows_within_the_limits() -> None:
    batch = learned_from(12, 16, overlong=SHAPE, max_row_tokens=10)
    assert [(row.reward, len(row), row.truncated) for row in batch.rows] == [(1.0, 10, True), (0.5, 10, True)]
    assert [len(row) for row in learned_from(12, 16).rows] == [14, 18]


def test_a_step_without_remaining_rows_reports_the_causes() -> None:
    with pytest.raises(UsageError, match="2 cut off"):
        learned_from(12, 16, max_row_tokens=2)

"""The learning rate of a step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.learning_rate import rate_share

SCHEDULES = ["constant", "linear", "cosine"]


def shares(**settings: object) -> list[float]:
    config = TrainConfig(**settings)
    return [rate_share(config, step) for step in range(config.steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_rises_in_equal_parts_and_ends_at_the_full_rate(schedule: str) -> None:
    assert shares(steps=8, warmup_steps=4, schedule=schedule)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_each_schedule_falls_as_it_says() -> None:
    settings = {"steps": 6, "warmup_steps": 2, "final_learning_rate_share": 0.2}
    assert shares(schedule="constant", **settings)[2:] == [1.0] * 5
    assert shares(schedule="linear", **settings)[2:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = [1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2]
    assert shares(schedule="cosine", **settings)[2:] == pytest.approx(cosine)


@given(st.sampled_from(SCHEDULES), st.integers(1, 40), st.integers(0, 40), st.floats(0, 1))
def test_after_the_warm_up_the_rate_never_rises_nor_leaves_its_bounds(
    schedule: str, steps: int, warmup: int, final: float
) -> None:
    warmup = min(warmup, steps)
    falling = shares(steps=steps, warmup_steps=warmup, schedule=schedule, final_learning_rate_share=final)[warmup:]
    assert all(left >= right for left, right in itertools.pairwise(falling))
    assert all(final - 1e-9 <= share <= 1.0 for share in falling)

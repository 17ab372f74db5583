"""The learning rate of a step."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.learning.optimizer import Schedule, learning_rate_factor

SCHEDULES = get_args(Schedule)


def shares(schedule: Schedule, *, steps: int, warmup: int, final_share: float = 0.0) -> list[float]:
    return [
        learning_rate_factor(step, steps=steps, warmup=warmup, schedule=schedule, final_share=final_share)
        for step in range(steps + 1)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_rises_in_equal_parts_and_ends_at_the_full_rate(schedule: Schedule) -> None:
    assert shares(schedule, steps=8, warmup=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_each_schedule_decays_as_documented() -> None:
    assert shares("constant", steps=6, warmup=2, final_share=0.2)[2:] == [1.0] * 5
    assert shares("linear", steps=6, warmup=2, final_share=0.2)[2:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = [1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2]
    assert shares("cosine", steps=6, warmup=2, final_share=0.2)[2:] == pytest.approx(cosine)


@given(st.sampled_from(SCHEDULES), st.integers(1, 40), st.integers(0, 40), st.floats(0, 1))
def test_after_the_warm_up_the_rate_never_rises_nor_leaves_its_bounds(
    schedule: Schedule, steps: int, warmup: int, final: float
) -> None:
    warmup = min(warmup, steps)
    falling = shares(schedule, steps=steps, warmup=warmup, final_share=final)[warmup:]
    assert all(left >= right for left, right in itertools.pairwise(falling))
    assert all(final - 1e-9 <= share <= 1.0 for share in falling)

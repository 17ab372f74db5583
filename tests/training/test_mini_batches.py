"""The division of a batch into mini-batches."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.learning.batches import micro_batches, mini_batches
from agentfly.training.rows import Row

LENGTHS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), max_size=12)


def rows_of(trajectories: list[list[int]]) -> list[Row]:
    return [
        Row(
            ids=[1] * length,
            loss_mask=[1] * length,
            logprobs=[0.0] * length,
            versions=[0] * length,
            group_id="g",
            rollout_id=f"r{number}",
            reward=0.0,
            truncated=False,
        )
        for number, lengths in enumerate(trajectories)
        for length in lengths
    ]


@given(LENGTHS, st.integers(1, 20), st.text(max_size=3))
def test_mini_batches_hold_each_row_once_and_trajectories_whole_and_are_alike_in_size(
    trajectories: list[list[int]], count: int, seed: str
) -> None:
    rows = rows_of(trajectories)
    parts = mini_batches(rows, count, seed)
    assert sorted(index for part in parts for index in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in parts)
    held = [{rows[index].rollout_id for index in part} for part in parts]
    assert sum(map(len, held)) == len(trajectories)
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert len(parts) == max(1, min(count, len(trajectories)))


def test_mini_batches_are_drawn_by_the_seed() -> None:
    rows = rows_of([[1]] * 40)
    assert mini_batches(rows, 4, "0/1/0") == mini_batches(rows, 4, "0/1/0") != mini_batches(rows, 4, "0/2/0")


@given(LENGTHS, st.integers(1, 60))
def test_micro_batches_keep_the_order_and_the_limit(trajectories: list[list[int]], tokens: int) -> None:
    rows = rows_of(trajectories)
    parts = micro_batches(rows, range(len(rows)), tokens)
    assert [index for part in parts for index in part] == list(range(len(rows)))
    assert all(len(part) == 1 or sum(len(rows[index]) for index in part) <= tokens for part in parts)
    assert len(parts) <= 2 * math.ceil(sum(map(len, rows)) / tokens) + sum(len(row) > tokens for row in rows)

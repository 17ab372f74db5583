"""Aggregation: any split into micro-batches and any padding gives the same value and gradient."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.training.losses.aggregation import Aggregation, AggregationName

ROWS = [[1.0, 3.0], [5.0], [2.0, 4.0, 6.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 21 / 6),
        ("sequence_mean", (4 + 5 + 12) / 3),
        ("sequence_token_mean", (2 + 5 + 4) / 3),
        ("constant", (4 + 5 + 12) / (3 * 10)),
    ],
)
def test_each_aggregation_is_that_worked_by_hand(name: AggregationName, expected: float) -> None:
    values = torch.tensor([value for row in ROWS for value in row])
    row = torch.tensor([0, 0, 1, 2, 2, 2])
    aggregation = Aggregation(name, tokens=6, rows=3, row_tokens=10)
    assert aggregation(values, torch.ones(6, dtype=torch.bool), row).item() == pytest.approx(expected)


def test_token_mean_of_two_uneven_micro_batches_equals_the_whole_batch() -> None:
    mean = Aggregation("token_mean", tokens=10, rows=2)
    parts = [(torch.ones(2), torch.ones(2, dtype=torch.bool)), (torch.zeros(8), torch.ones(8, dtype=torch.bool))]
    assert sum(
        mean(values, mask, torch.zeros(len(mask), dtype=torch.int64)).item() for values, mask in parts
    ) == pytest.approx(0.2)


def test_divergence_of_tokens_that_the_policy_did_not_sample_does_not_count() -> None:
    values = torch.tensor([0.1, 0.1, -9.0, -9.0, 0.1])
    mask = torch.tensor([1, 1, 0, 0, 1], dtype=torch.bool)
    row = torch.zeros(5, dtype=torch.int64)
    for name in ("token_mean", "sequence_token_mean"):
        assert Aggregation(name, tokens=3, rows=1)(values, mask, row).item() == pytest.approx(0.1)


@settings(deadline=None)
@given(
    name=st.sampled_from(get_args(AggregationName)),
    rows=st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_no_split_and_no_padding_changes_value_or_gradient(
    name: AggregationName, rows: list[list[float]], data: st.DataObject
) -> None:
    whole = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    aggregation = Aggregation(name, tokens=len(whole), rows=len(rows), row_tokens=7)
    numbers = torch.repeat_interleave(torch.tensor([len(row) for row in rows]))
    expected = whole.clone().requires_grad_()
    total = aggregation(expected, torch.ones_like(whole, dtype=torch.bool), numbers)
    total.backward()

    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=3).map(sorted), label="cuts")
    value, gradient = 0.0, []
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = rows[start:stop]
        width = max(map(len, part), default=0) + data.draw(st.integers(0, 2), label="padding")
        values = torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in part], dtype=torch.float64)
        values = values.reshape(-1).requires_grad_()
        mask = torch.tensor([place < len(row) for row in part for place in range(width)], dtype=torch.bool)
        row = torch.arange(len(part)).repeat_interleave(width)
        share = aggregation(values, mask, row)
        share.backward()
        assert values.grad is not None
        value += share.item()
        gradient += values.grad[mask].tolist()
        assert not values.grad[~mask].any()
    assert value == pytest.approx(total.item(), abs=1e-12)
    assert expected.grad is not None
    assert gradient == pytest.approx(expected.grad.tolist(), abs=1e-12)


@pytest.mark.parametrize("name", get_args(AggregationName))
def test_a_batch_that_is_masked_out_gives_zero_and_finite_gradients(name: AggregationName) -> None:
    values = torch.tensor([-math.inf, math.nan, -2.0], requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool)
    total = Aggregation(name, tokens=0, rows=0)(values, mask, torch.tensor([0, 0, 1]))
    total.backward()
    assert total.item() == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0, 0.0]

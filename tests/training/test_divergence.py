"""Divergence from a reference, against numbers worked by hand and by property."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.losses.divergence import k3_divergence


def test_the_divergence_estimate_is_that_worked_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)])
    reference = torch.tensor([math.log(0.25), math.log(0.5)])
    values = k3_divergence(logprobs, reference, torch.ones(2, dtype=torch.bool))
    assert values.tolist() == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2)])


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=8))
def test_the_divergence_estimate_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).T
    assert (k3_divergence(logprobs, reference, torch.ones_like(logprobs, dtype=torch.bool)) >= -1e-12).all()

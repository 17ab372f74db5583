"""KL divergence from a reference: values computed by hand, and properties."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentfly.training.losses.kl import SampledEstimator, full_kl, kl_estimate, with_k2_gradient

ALL = torch.ones(2, dtype=torch.bool)
LOGPROBS = torch.tensor([math.log(0.5), math.log(0.25)])
REFERENCE = torch.tensor([math.log(0.25), math.log(0.5)])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
        ("low_variance", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_each_estimate_is_that_worked_by_hand(estimator: SampledEstimator, expected: list[float]) -> None:
    assert kl_estimate(estimator, LOGPROBS, REFERENCE, ALL).tolist() == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=8))
def test_k2_k3_and_low_variance_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).T
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    for estimator in ("k2", "k3", "low_variance"):
        assert (kl_estimate(estimator, logprobs, reference, mask) >= -1e-12).all()


@pytest.mark.parametrize("estimator", get_args(SampledEstimator))
@pytest.mark.parametrize("plus", [False, True])
def test_masked_tokens_affect_neither_value_nor_gradient(estimator: SampledEstimator, plus: bool) -> None:
    logprobs = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    reference = torch.tensor([-2.0, -math.inf, math.nan])
    mask = torch.tensor([True, False, False])
    values = kl_estimate(estimator, logprobs, reference, mask)
    if plus:
        values = with_k2_gradient(values, logprobs, reference, mask)
    values.sum().backward()
    assert values[1:].tolist() == [0.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad[1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0] != 0


def gradient_on_average(estimator: SampledEstimator, plus: bool, logits: Tensor, reference: Tensor) -> Tensor:
    """Mean over all tokens, each as often as the policy samples it, of the gradient by the policy's logits."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    values = kl_estimate(estimator, logprobs, reference.log_softmax(-1), mask)
    if plus:
        values = with_k2_gradient(values, logprobs, reference.log_softmax(-1), mask)
    return torch.autograd.grad((logprobs.exp().detach() * values).sum(), logits)[0]


def test_the_gradient_of_k2_is_on_average_that_of_the_divergence_and_that_of_k1_is_nothing() -> None:
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 7, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    (exact,) = torch.autograd.grad(full_kl(leaf, reference), leaf)
    for estimator in get_args(SampledEstimator):
        torch.testing.assert_close(gradient_on_average(estimator, True, logits, reference), exact)
    torch.testing.assert_close(gradient_on_average("k2", False, logits, reference), exact)
    torch.testing.assert_close(gradient_on_average("k1", False, logits, reference), torch.zeros(7, dtype=torch.float64))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), spread=st.floats(0.01, 5.0))
def test_the_full_divergence_equals_the_divergence_of_the_two_distributions(seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logits, reference = spread * torch.randn(2, 3, 11, generator=random, dtype=torch.float64)
    of = torch.distributions.Categorical
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    values = full_kl(mine, reference)
    expected = torch.distributions.kl_divergence(of(logits=theirs), of(logits=reference))
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), mine)[0], torch.autograd.grad(expected.sum(), theirs)[0]
    )


def test_tokens_that_the_policy_rules_out_add_nothing_to_the_full_divergence() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    values = full_kl(logits, torch.tensor([[math.log(0.5), 0.0, -math.inf]]))
    values.sum().backward()
    assert values.item() == pytest.approx(0.5 * math.log(1.5) + 0.5 * math.log(0.75))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()

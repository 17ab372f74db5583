"""Losses against numbers worked by hand, and by property."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentfly.errors import ConfigError
from agentfly.training.losses import (
    LOSSES,
    ClipRange,
    TokenBatch,
    k3_divergence,
    policy_gradient,
    ppo_clip,
    probability_ratio,
    token_mean,
)

CLIP = ClipRange(low=0.2, high=0.28)


def batch_of(
    ratios: Sequence[float], advantages: Sequence[float], mask: Sequence[int] | None = None
) -> tuple[TokenBatch, Tensor]:
    behaviour = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (behaviour + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    kept = torch.tensor(mask if mask is not None else [1] * len(ratios), dtype=torch.bool)
    return TokenBatch(logprobs, behaviour, torch.tensor(advantages, dtype=torch.float64), kept), logprobs


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (1.5, 1.0, -1.28, True),  # good, and already pushed up enough
        (0.5, 1.0, -0.5, False),  # good, and moved the wrong way: still pushed
        (1.5, -1.0, 1.5, False),  # bad, and moved the wrong way: still pushed
        (0.5, -1.0, 0.8, True),  # bad, and already pushed down enough
        (1.25, 2.0, -2.5, False),  # inside the wider upper bound
    ],
)
def test_the_clipped_loss_is_that_worked_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    batch, logprobs = batch_of([ratio], [advantage])
    result = ppo_clip(batch, CLIP)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() is clipped
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_at_the_sampling_weights_the_gradient_is_that_of_the_plain_policy_gradient() -> None:
    for loss in (ppo_clip, policy_gradient):
        batch, logprobs = batch_of([1.0, 1.0], [0.5, -2.0])
        loss(batch, CLIP).loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx([-0.5, 2.0])


def test_without_clipping_a_far_token_is_still_pushed() -> None:
    batch, logprobs = batch_of([3.0], [1.0])
    policy_gradient(batch, CLIP).loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-3.0)


def test_token_mean_of_two_uneven_micro_batches_is_that_of_the_whole_batch() -> None:
    ones, zeros = torch.ones(2), torch.zeros(8)
    total = token_mean(ones, torch.ones(2, dtype=torch.bool), 10) + token_mean(
        zeros, torch.ones(8, dtype=torch.bool), 10
    )
    assert total.item() == pytest.approx(0.2)


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.data())
def test_no_split_and_no_padding_changes_the_token_mean(values: list[float], data: st.DataObject) -> None:
    expected = sum(values) / len(values)
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=4).map(sorted))
    pads = data.draw(st.lists(st.integers(0, 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    total = 0.0
    for start, stop, pad in zip([0, *cuts], [*cuts, len(values)], pads, strict=True):
        part = values[start:stop]
        mask = torch.tensor([True] * len(part) + [False] * pad, dtype=torch.bool)
        padded = torch.tensor([*part, *[math.nan] * pad], dtype=torch.float64)
        total += token_mean(padded, mask, len(values)).item()
    assert total == pytest.approx(expected, abs=1e-12)


def test_a_batch_that_is_masked_out_gives_loss_zero_and_finite_gradients() -> None:
    logprobs = torch.tensor([-math.inf, math.nan, -2.0], requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool)
    batch = TokenBatch(logprobs, torch.tensor([math.nan, -1.0, -math.inf]), torch.tensor([math.nan, 1.0, 1.0]), mask)
    loss = token_mean(ppo_clip(batch, CLIP).loss, mask, 0)
    loss = loss + token_mean(k3_divergence(logprobs, batch.behaviour, mask), mask, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_vastly_more_or_less_likely_gives_finite_numbers(advantage: float) -> None:
    logprobs = torch.tensor([-0.01, -5000.0], requires_grad=True)
    behaviour = torch.tensor([-5000.0, -0.01])
    mask = torch.ones(2, dtype=torch.bool)
    batch = TokenBatch(logprobs, behaviour, torch.full((2,), advantage), mask)
    result = ppo_clip(batch, CLIP)
    total = result.loss.sum() + k3_divergence(logprobs, behaviour, mask).sum()
    total.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(total)
    assert torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(result.ratio).all()


def test_a_ratio_is_one_when_both_sides_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    behaviour = (logits / 0.5).log_softmax(-1)[:1]
    assert behaviour.item() == pytest.approx(-0.143, abs=5e-4)
    mask = torch.ones(1, dtype=torch.bool)
    assert probability_ratio((logits / 0.5).log_softmax(-1)[:1], behaviour, mask).item() == pytest.approx(1.0)
    assert probability_ratio(logits.log_softmax(-1)[:1], behaviour, mask).item() == pytest.approx(0.767, abs=1e-3)


def test_divergence_of_tokens_that_the_policy_did_not_sample_does_not_count() -> None:
    values = torch.tensor([0.1, 0.1, -9.0, -9.0, 0.1])
    mask = torch.tensor([1, 1, 0, 0, 1], dtype=torch.bool)
    assert token_mean(values, mask, 3).item() == pytest.approx(0.1)


def test_the_divergence_estimate_is_that_worked_by_hand() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)])
    reference = torch.tensor([math.log(0.25), math.log(0.5)])
    values = k3_divergence(logprobs, reference, torch.ones(2, dtype=torch.bool))
    assert values.tolist() == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2)])


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=8))
def test_the_divergence_estimate_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).T
    assert (k3_divergence(logprobs, reference, torch.ones_like(logprobs, dtype=torch.bool)) >= -1e-12).all()


def test_an_unknown_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ppo_clip'"):
        LOSSES["ppo_clp"]


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ConfigError, match="already"):
        LOSSES.register("ppo_clip", ppo_clip)

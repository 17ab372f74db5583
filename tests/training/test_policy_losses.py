"""Policy losses: values computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from agentfly.core.errors import ConfigError
from agentfly.training.losses import LOSSES
from agentfly.training.losses.aggregation import ClipRange, TokenBatch, log_ratio
from agentfly.training.losses.policy_losses import PolicyLoss, cispo, gspo, policy_gradient, ppo_clip

CLIP = ClipRange(low=0.2, high=0.28)
ALL = pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo, policy_gradient])


def batch_of(
    ratios: Sequence[float], advantages: Sequence[float], row: Sequence[int] | None = None
) -> tuple[TokenBatch, Tensor]:
    """Return tokens with the given ratios, by default one per row."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return (
        TokenBatch(
            logprobs=logprobs,
            old=old,
            advantages=torch.tensor(advantages, dtype=torch.float64),
            mask=torch.ones(len(ratios), dtype=torch.bool),
            row=torch.tensor(row if row is not None else range(len(ratios)), dtype=torch.int64),
            weights=torch.ones_like(old),
        ),
        logprobs,
    )


def gradient(loss: Tensor, logprobs: Tensor) -> list[float]:
    loss.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


@pytest.mark.parametrize("policy_loss", [ppo_clip, gspo])
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
def test_the_clipped_loss_is_that_worked_by_hand(
    policy_loss: PolicyLoss, ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    batch, logprobs = batch_of([ratio], [advantage])
    result = policy_loss(batch, CLIP)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() is clipped
    assert gradient(result.loss, logprobs) == pytest.approx([0.0 if clipped else -advantage * ratio])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (2.0, -1.0, 2.0, False),
        (5.0, -1.0, 3.0, True),  # bad, and moved far the wrong way: no longer pushed
        (5.0, -2.0, 6.0, True),
        (0.5, -1.0, 0.8, True),
        (5.0, 1.0, -1.28, True),  # what is good has its one bound
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    batch, logprobs = batch_of([ratio], [advantage])
    result = ppo_clip(batch, ClipRange(0.2, 0.28, dual=3.0))
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() is clipped
    assert gradient(result.loss, logprobs) == pytest.approx([0.0 if clipped else -advantage * ratio])


@ALL
def test_at_the_sampling_weights_the_gradient_equals_the_plain_policy_gradient(loss: PolicyLoss) -> None:
    batch, logprobs = batch_of([1.0, 1.0], [0.5, -2.0])
    assert gradient(loss(batch, CLIP).loss, logprobs) == pytest.approx([-0.5, 2.0])


def test_without_clipping_a_far_token_is_still_pushed() -> None:
    batch, logprobs = batch_of([3.0], [1.0])
    assert gradient(policy_gradient(batch, CLIP).loss, logprobs) == pytest.approx([-3.0])


def test_gspo_takes_the_geometric_mean_of_the_ratios_of_a_row() -> None:
    batch, logprobs = batch_of([2.0, 0.5, 1.1, 4.0], [1.0, 1.0, 1.0, 1.0], row=[0, 0, 1, 2])
    result = gspo(batch, CLIP)
    assert result.ratio.tolist() == pytest.approx([1.0, 1.0, 1.1, 4.0])
    assert result.loss.tolist() == pytest.approx([-1.0, -1.0, -1.1, -1.28])
    assert gradient(result.loss, logprobs) == pytest.approx([-1.0, -1.0, -1.1, 0.0])


def test_gspo_averaged_over_tokens_and_rows_has_the_gradient_of_the_ratios_of_sequences() -> None:
    batch, logprobs = batch_of([1.1, 1.2, 0.9], [0.7, 0.7, -0.4], row=[0, 0, 1])
    loss = gspo(batch, ClipRange(1.0, math.inf)).loss
    mine = gradient(torch.stack([loss[:2].mean(), loss[2:].mean()]).mean(), logprobs)
    again = batch.logprobs.detach().requires_grad_()
    sequences = [(again[:2] - batch.old[:2]).mean().exp() * 0.7, (again[2:] - batch.old[2:]).mean().exp() * -0.4]
    assert mine == pytest.approx(gradient(-torch.stack(sequences).mean(), again))


def test_cispo_clips_the_weight_and_leaves_no_token_out() -> None:
    batch, logprobs = batch_of([5.0, 0.1, 1.1], [1.0, -2.0, 1.0])
    result = cispo(batch, CLIP)
    assert result.loss.tolist() == pytest.approx(
        [-1.28 * (math.log(5.0) - 1), 0.8 * 2.0 * (math.log(0.1) - 1), -1.1 * (math.log(1.1) - 1)]
    )
    assert result.clipped.tolist() == [True, True, False]
    assert gradient(result.loss, logprobs) == pytest.approx([-1.28, 1.6, -1.1])


@ALL
def test_masked_tokens_affect_neither_loss_nor_gradient(loss: PolicyLoss) -> None:
    logprobs = torch.tensor([-0.5, -math.inf, math.nan, -0.7], requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        old=torch.tensor([-0.5 - math.log(1.25), math.nan, -1.0, -math.inf]),
        advantages=torch.tensor([2.0, math.nan, math.inf, 1.0]),
        mask=torch.tensor([True, False, False, False]),
        row=torch.tensor([0, 0, 0, 1]),
        weights=torch.ones(4),
    )
    result = loss(batch, CLIP)
    assert result.loss[1:].tolist() == [0.0, 0.0, 0.0]
    assert result.ratio.tolist() == pytest.approx([1.25, 1.0, 1.0, 1.0])
    assert gradient(result.loss, logprobs) == pytest.approx([-2.5, 0.0, 0.0, 0.0])


@ALL
def test_a_batch_without_tokens_has_a_loss_without_tokens(loss: PolicyLoss) -> None:
    batch, logprobs = batch_of([], [])
    assert gradient(loss(batch, CLIP).loss, logprobs) == []


@ALL
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_vastly_more_or_less_likely_gives_finite_numbers(
    loss: PolicyLoss, advantage: float
) -> None:
    logprobs = torch.tensor([-0.01, -5000.0], requires_grad=True)
    old = torch.tensor([-5000.0, -0.01])
    row = torch.tensor([0, 1])
    mask = torch.ones(2, dtype=torch.bool)
    result = loss(TokenBatch(logprobs, old, torch.full((2,), advantage), mask, row, torch.ones(2)), CLIP)
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(result.ratio).all()
    assert all(map(math.isfinite, gradient(result.loss, logprobs)))


def test_a_ratio_is_one_when_both_sides_are_at_the_sampling_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    behaviour = (logits / 0.5).log_softmax(-1)[:1]
    assert behaviour.item() == pytest.approx(-0.143, abs=5e-4)
    mask = torch.ones(1, dtype=torch.bool)
    assert log_ratio((logits / 0.5).log_softmax(-1)[:1], behaviour, mask).item() == pytest.approx(0.0)
    assert log_ratio(logits.log_softmax(-1)[:1], behaviour, mask).item() == pytest.approx(-0.265, abs=1e-3)


def test_an_unknown_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ppo_clip'"):
        LOSSES["ppo_clp"]


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ConfigError, match="already"):
        LOSSES.register("ppo_clip", PolicyLoss(ppo_clip))


def test_a_bare_function_cannot_be_registered_as_a_loss() -> None:
    with pytest.raises(ConfigError, match="is a function, and has to be of the class PolicyLoss"):
        LOSSES.register("mine", ppo_clip)  # type: ignore[arg-type]

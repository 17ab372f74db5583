"""The critic's loss: values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentfly.training.losses.policy_losses import value_loss


@pytest.mark.parametrize(
    ("value", "target", "clip", "loss", "clipped"),
    [
        (1.0, 3.0, None, 2.0, False),
        (1.0, 3.0, 2.0, 2.0, False),  # within the bound
        (1.0, 3.0, 0.5, 0.5 * 2.5**2, True),  # moved towards the return, as far as it may: not pushed on
        (-1.0, 3.0, 0.5, 0.5 * 4.0**2, False),  # moved away from it: still pushed
    ],
)
def test_the_value_loss_is_that_worked_by_hand(
    value: float, target: float, clip: float | None, loss: float, clipped: bool
) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, torch.zeros(1), torch.tensor([target]), torch.ones(1, dtype=torch.bool), clip)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() is clipped
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(0.0 if clipped else value - target)


def test_masked_tokens_affect_neither_loss_nor_gradient() -> None:
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    result = value_loss(
        values, torch.tensor([0.0, math.inf]), torch.tensor([2.0, math.nan]), torch.tensor([True, False]), 0.5
    )
    result.loss.sum().backward()
    assert result.loss[1] == 0.0
    assert values.grad is not None
    assert values.grad[1] == 0.0

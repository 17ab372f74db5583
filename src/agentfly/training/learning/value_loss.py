"""The loss of a critic, one value a token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """A critic's loss before it is averaged.

    Attributes:
        loss: half the squared error of each value; [N].
        clipped: bool, the tokens whose gradient the clipping took away; [N].
    """

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error, the larger of that of the value and of the value held near what it was.

    Source: the implementation of PPO, https://arxiv.org/abs/2005.12729, section 2.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, mask.new_zeros(mask.shape))
    held = (values.maximum(before - clip).minimum(before + clip) - returns).square()
    return ValueLoss(0.5 * free.maximum(held), held > free)

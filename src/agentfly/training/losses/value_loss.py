"""value_loss: what teaches a critic the returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.losses.token_batch import masked

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """A critic's loss before it is averaged.

    Attributes:
        loss: loss of each token, 0 where the mask is False; [N].
        clipped: bool, the tokens whose gradient the clipping took away; [N].
    """

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error, of the value as it is or as far as it may have moved, whichever is the larger.

    Source: PPO as OpenAI's baselines have it; https://arxiv.org/abs/2005.12729, section 3.

    Args:
        values: what the critic says now, with its gradient; [N].
        old: what it said before the step; [N].
        returns: what it should say; [N].
        mask: bool, the tokens that count; [N].
        clip: how far a value may move from the old one, in units of reward; None sets no bound.
    """
    values, old, returns = (masked(tensor, mask) for tensor in (values, old, returns))
    free = 0.5 * (values - returns).square()
    if clip is None:
        return ValueLoss(loss=free, clipped=mask.new_zeros(mask.shape))
    bounded = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    return ValueLoss(loss=free.maximum(bounded), clipped=bounded > free)

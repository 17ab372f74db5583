"""TokenBatch: sampled tokens, with what a policy loss needs to know of each, and TokenLoss, what it makes of them.

What stands where the mask is False, NaN and infinities included, reaches neither value nor gradient: it is replaced
before anything is computed from it, since a NaN that is multiplied by 0 stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of the losses are wanted where torch is not installed, too
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probs are held within this, so that a ratio, and with it a loss, is always finite."""


@dataclass(frozen=True)
class TokenBatch:
    """N sampled tokens, those of a row together or not, with what a policy loss needs to know of each.

    Attributes:
        logprobs: log-probs under the weights that are trained, with their gradient; [N].
        old: log-probs that the ratio is taken to; [N]. They are those under which the tokens were sampled, or, with
            rollout correction, the trainer's own before the update.
        advantages: [N].
        mask: bool, the tokens that count; [N].
        row: int64, the row of each token, from 0; [N]. Rows are whole: no other batch holds tokens of them.
        weights: what rollout correction weighs each token by, 1 without it; [N]. A token's loss is multiplied by it
            afterwards, and a loss need not look at it.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    row: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ClipRange:
    """How far a token's probability may move before it is no longer pushed on: ratios ``1 - low`` to ``1 + high``.

    Attributes:
        low: 1 sets no bound below.
        high: may be infinite.
        dual: where an advantage is negative, the loss is at most this many times it (dual clip); None sets no bound.
    """

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss before it is averaged.

    Attributes:
        loss: loss of each token, 0 where the mask is False; [N].
        ratio: probability of each token now over the old one, or the mean of that over its row, 1 where the mask is
            False; [N].
        clipped: bool, the tokens that the clipping has to do with; [N].
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where the mask is True, and ``fill``, with no gradient, elsewhere."""
    return values.masked_fill(~mask, fill)


def log_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Log of the probability under ``logprobs`` over that under ``old``, within bounds; 0 where the mask is False."""
    return (masked(logprobs, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

"""Policy losses: what pushes up the probability of tokens that were better than expected. Pure, one value a token.

value_loss: what teaches a critic the returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.losses.aggregation import (
    LOG_RATIO_LIMIT,
    ClipRange,
    TokenBatch,
    TokenLoss,
    log_ratio,
    masked,
    row_means,
)

if TYPE_CHECKING:
    from torch import Tensor


LossFunction = Callable[[TokenBatch, ClipRange], TokenLoss]
"""A loss of a batch's tokens, differentiable by ``batch.logprobs``. 0 where the mask is False."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of tokens, and which settings it reads.

    Attributes:
        compute: makes the loss; a pure function.
        uses: names of the settings that it reads of those in `ClipRange`: ``clip_low``, ``clip_high``, ``clip_dual``.
            Others are refused with it.
    """

    compute: LossFunction
    uses: tuple[str, ...] = ()

    def __call__(self, batch: TokenBatch, clip: ClipRange) -> TokenLoss:
        return self.compute(batch, clip)


def ppo_clip(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """The clipped surrogate of each token's own ratio.

    Source: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476,
    equation 10; dual clip: https://arxiv.org/abs/1912.09729, equation 8.
    """
    return _clipped_surrogate(log_ratio(batch.logprobs, batch.old, batch.mask).exp(), batch, clip)


def gspo(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """The clipped surrogate of the ratio of a token's whole row: the geometric mean over its tokens.

    The value of each token's ratio is that of its row, and its gradient that of its own log-prob, times the ratio. With
    one advantage in all tokens of a row and ``sequence_token_mean`` this has the value and the gradient of GSPO; with
    advantages that differ within a row it is GSPO-token. Ratios of rows hardly leave 1, so bounds are to be much
    narrower than those of tokens: the paper takes 0.0003 below and 0.0004 above.

    Source: GSPO, https://arxiv.org/abs/2507.18071, equations 5, 7 and 13.
    """
    logprobs = masked(batch.logprobs, batch.mask)
    of_rows = row_means((logprobs - masked(batch.old, batch.mask)).detach(), batch.mask, batch.row)
    of_tokens = masked(of_rows[batch.row], batch.mask) + logprobs - logprobs.detach()
    return _clipped_surrogate(of_tokens.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), batch, clip)


def cispo(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """REINFORCE with each token weighed by its ratio, which is clipped and has no gradient: no token is left out.

    The paper sets no bound below (``clip_low: 1``).

    Source: CISPO of MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5.
    """
    ratio = log_ratio(batch.logprobs.detach(), batch.old, batch.mask).exp()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = -weight * masked(batch.advantages, batch.mask) * masked(batch.logprobs, batch.mask)
    return TokenLoss(loss=loss, ratio=ratio, clipped=weight != ratio)


def policy_gradient(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """The importance-weighted policy gradient: the ratio times the advantage, with nothing clipped.

    Its gradient is that of REINFORCE, with each token weighed by its ratio, whatever the bounds.
    """
    ratio = log_ratio(batch.logprobs, batch.old, batch.mask).exp()
    loss = -masked(batch.advantages, batch.mask) * ratio
    return TokenLoss(loss=loss, ratio=ratio, clipped=batch.mask.new_zeros(batch.mask.shape))


def _clipped_surrogate(ratio: Tensor, batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    advantages = masked(batch.advantages, batch.mask)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss, clipped = free.maximum(bounded), bounded > free
    if clip.dual is not None:
        most = -advantages * clip.dual
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = most.where(beyond, loss), clipped | beyond
    return TokenLoss(loss=loss, ratio=ratio, clipped=clipped)


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

"""Policy losses and the critic's value loss: pure functions with one value per token."""

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
"""A loss of a batch's tokens, differentiable with respect to ``batch.logprobs``; 0 where the mask is False."""


@dataclass(frozen=True)
class PolicyLoss:
    """A token loss and the settings that it reads.

    Attributes:
        compute: computes the loss; a pure function.
        uses: the settings for `ClipRange` that it reads: ``clip_low``, ``clip_high``, ``clip_dual``. Other settings
            are rejected.
    """

    compute: LossFunction
    uses: tuple[str, ...] = ()

    def __call__(self, batch: TokenBatch, clip: ClipRange) -> TokenLoss:
        return self.compute(batch, clip)


def ppo_clip(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """Return the clipped surrogate of each token's own ratio.

    Source: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476,
    equation 10; dual clip: https://arxiv.org/abs/1912.09729, equation 8.
    """
    return _clipped_surrogate(log_ratio(batch.logprobs, batch.old, batch.mask).exp(), batch, clip)


def gspo(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """Return the clipped surrogate of the row's ratio, the geometric mean over its tokens.

    Each token has the value of its row's ratio, and the gradient of its own log-prob times the ratio. With one
    advantage per row and ``sequence_token_mean`` this has the value and gradient of GSPO; with advantages that differ
    within a row it is GSPO-token. Row ratios stay close to 1, so the bounds must be much narrower than for tokens: the
    paper uses 0.0003 below and 0.0004 above.

    Source: GSPO, https://arxiv.org/abs/2507.18071, equations 5, 7 and 13.
    """
    logprobs = masked(batch.logprobs, batch.mask)
    of_rows = row_means((logprobs - masked(batch.old, batch.mask)).detach(), batch.mask, batch.row)
    of_tokens = masked(of_rows[batch.row], batch.mask) + logprobs - logprobs.detach()
    return _clipped_surrogate(of_tokens.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), batch, clip)


def cispo(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """Return the REINFORCE loss, weighted by each token's clipped ratio without gradient. No token loses its gradient.

    The paper sets no lower bound (``clip_low: 1``).

    Source: CISPO of MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5.
    """
    ratio = log_ratio(batch.logprobs.detach(), batch.old, batch.mask).exp()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = -weight * masked(batch.advantages, batch.mask) * masked(batch.logprobs, batch.mask)
    return TokenLoss(loss=loss, ratio=ratio, clipped=weight != ratio)


def policy_gradient(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """Return the importance-weighted policy gradient: the ratio times the advantage, without clipping.

    Its gradient is the REINFORCE gradient, weighted by each token's ratio.
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
        clipped: bool, the tokens without gradient because of clipping; [N].
    """

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """Return half the squared error of the value or of the clipped value, whichever is larger.

    Source: PPO in OpenAI's baselines; https://arxiv.org/abs/2005.12729, section 3.

    Args:
        values: the critic's current values, with gradient; [N].
        old: its values before the step; [N].
        returns: the targets; [N].
        mask: bool, the tokens that count; [N].
        clip: maximum distance from the old value, in units of reward; None sets no bound.
    """
    values, old, returns = (masked(tensor, mask) for tensor in (values, old, returns))
    free = 0.5 * (values - returns).square()
    if clip is None:
        return ValueLoss(loss=free, clipped=mask.new_zeros(mask.shape))
    bounded = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    return ValueLoss(loss=free.maximum(bounded), clipped=bounded > free)

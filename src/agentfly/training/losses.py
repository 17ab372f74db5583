"""Losses: pure functions over tensors, one value a token, and how they are averaged.

`LOSSES` holds the policy losses by name, and the configuration's ``loss`` chooses one. All functions take a mask of the
tokens that count, and what stands elsewhere, NaN and infinities included, reaches neither value nor gradient: it is
replaced before anything is computed from it, since a NaN that is multiplied by 0 stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.registry import Registry

if TYPE_CHECKING:  # the names of the losses are wanted where torch is not installed, too
    from torch import Tensor

_RATIO_LIMIT = 20.0
"""Differences of log-probs are held within this, so that a ratio, and with it a loss, is always finite."""


@dataclass(frozen=True)
class TokenBatch:
    """Sampled tokens, in any shape (here [N]), with what a policy loss needs to know of each.

    Attributes:
        logprobs: log-probs under the weights that are trained, with their gradient; [N].
        behaviour: log-probs under which the tokens were sampled; [N].
        advantages: [N].
        mask: bool, the tokens that count; [N].
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ClipRange:
    """How far a token's probability may move before it is no longer pushed on: ratios ``1 - low`` to ``1 + high``."""

    low: float
    high: float


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss before it is averaged.

    Attributes:
        loss: loss of each token, 0 where the mask is False; [N].
        ratio: probability of each token now over that when it was sampled, 1 where the mask is False; [N].
        clipped: bool, the tokens whose gradient the clipping took away; [N].
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLoss = Callable[[TokenBatch, ClipRange], TokenLoss]

LOSSES: Registry[PolicyLoss] = Registry("loss")


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where the mask is True, and ``fill``, with no gradient, elsewhere."""
    return values.masked_fill(~mask, fill)


def probability_ratio(logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Probability of each token under ``logprobs`` over that under ``behaviour``; 1 where the mask is False."""
    difference = masked(logprobs, mask) - masked(behaviour, mask)
    return difference.clamp(-_RATIO_LIMIT, _RATIO_LIMIT).exp()


def ppo_clip(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """The clipped surrogate, with separate bounds below and above.

    Source: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476,
    equation 10. The ratio is to the policy that sampled the token, by the log-prob recorded then.
    """
    ratio = probability_ratio(batch.logprobs, batch.behaviour, batch.mask)
    advantages = masked(batch.advantages, batch.mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return TokenLoss(loss=unclipped.maximum(clipped), ratio=ratio, clipped=clipped > unclipped)


def policy_gradient(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
    """The importance-weighted policy gradient: the ratio times the advantage, with nothing clipped.

    Its gradient at the weights that sampled is that of REINFORCE, whatever the bounds.
    """
    ratio = probability_ratio(batch.logprobs, batch.behaviour, batch.mask)
    loss = -masked(batch.advantages, batch.mask) * ratio
    return TokenLoss(loss=loss, ratio=ratio, clipped=batch.mask.new_zeros(batch.mask.shape))


def k3_divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) at each token, never negative, 0 where the mask is False; [N].

    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html, estimator k3.
    """
    ratio = probability_ratio(reference, logprobs, mask)
    return ratio - 1.0 - (masked(reference, mask) - masked(logprobs, mask)).clamp(-_RATIO_LIMIT, _RATIO_LIMIT)


def token_mean(values: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """The sum over the masked tokens, over the number of tokens of the *whole* batch.

    The means of micro-batches of one batch, each with the same ``tokens``, add up to the mean of the batch, however
    it was split or padded. 0 for a batch without tokens.
    """
    return masked(values, mask).sum() / max(tokens, 1)


LOSSES.register("ppo_clip", ppo_clip)
LOSSES.register("policy_gradient", policy_gradient)

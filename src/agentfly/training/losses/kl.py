"""Divergence of the policy from a reference, KL(policy || reference) in nats, at each token.

Where the reference is the policy before training it holds the policy back, as a penalty in the loss or in the reward.
The estimates of `kl_estimate` look at the sampled token alone, and are right on average over what the policy samples;
`full_kl` is right at each token, and needs the logits of both.

Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

KLCoefficient: how much a divergence counts, and how that follows the divergence that is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, assert_never

from agentfly.training.losses.aggregation import log_ratio, masked

if TYPE_CHECKING:
    from torch import Tensor


SampledEstimator = Literal["k1", "k2", "k3", "low_variance"]

MAX_LOW_VARIANCE_KL = 10.0
"""Nats above which ``low_variance`` does not go."""


def kl_estimate(estimator: SampledEstimator, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate at each sampled token; 0 where the mask is False; [N].

    * ``k1``: the difference of the log-probs. Right on average, and noisy. Its gradient is 0 on average: in a loss it
      holds nothing back.
    * ``k2``: half its square. Wrong on average where the two are far apart, and its gradient is right.
    * ``k3``: never negative, and right on average. Its gradient is that of the divergence the other way round.
    * ``low_variance``: ``k3``, of which no token has more than `MAX_LOW_VARIANCE_KL` (verl: ``low_var_kl``).

    Args:
        estimator: one of these.
        logprobs: log-probs of the policy, with their gradient; [N].
        reference: log-probs of the reference; [N].
        mask: bool, the tokens that the policy sampled; [N].
    """
    match estimator:
        case "k1":
            return masked(logprobs, mask) - masked(reference, mask)
        case "k2":
            return 0.5 * (masked(logprobs, mask) - masked(reference, mask)).square()
        case "k3":
            return k3_estimate(logprobs, reference, mask)
        case "low_variance":
            return k3_estimate(logprobs, reference, mask).clamp(max=MAX_LOW_VARIANCE_KL)
        case _:
            assert_never(estimator)


def k3_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate that is never negative, finite, and 0 where the mask is False; [N]."""
    difference = log_ratio(reference, logprobs, mask)
    return (difference.expm1() - difference).clamp(min=0.0)  # exp(x) - 1 would round small divergences away


def with_k2_gradient(values: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``values``, whatever they were estimated by, with the gradient of ``k2``, which is right on average; [N].

    verl writes it as a ``+`` after the estimator's name. Source: https://arxiv.org/abs/2510.01555.
    """
    k2 = kl_estimate("k2", logprobs, reference, mask)
    return masked(values, mask).detach() + k2 - k2.detach()


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """The divergence itself, summed over the vocabulary, with its own gradient.

    Tokens that the policy rules out (a logit of minus infinity) add nothing. The logits of both are held in memory, so
    that a long batch is to be given in chunks.

    Args:
        logits: of the policy, divided by the temperature; [..., vocabulary].
        reference_logits: of the reference, divided by the same; [..., vocabulary].

    Returns:
        [...].
    """
    logprobs = logits.log_softmax(dim=-1)
    # Without the gradient of the difference: its mean over the vocabulary is 0, and would be rounding.
    difference = (logprobs - reference_logits.log_softmax(dim=-1)).detach()
    return (logprobs.exp() * masked(difference, logprobs.isfinite())).sum(dim=-1)


_MAX_ERROR = 0.2
"""A divergence counts as off its target by at most this share of it."""


@dataclass(frozen=True)
class AdaptiveKLController:
    """The weight of the divergence in a step; a value, of which each step makes the next.

    Source: Ziegler and others, Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593,
    section 2.2.

    Attributes:
        value: the weight, per nat and token. A checkpoint keeps it.
        target_nats: the mean divergence per token that it steers to; None leaves it as it is.
        horizon_rows: number of rows over which it can move by a fifth.
    """

    value: float
    target_nats: float | None = None
    horizon_rows: int = 10_000

    def updated(self, divergence_nats: float, rows: int) -> AdaptiveKLController:
        """The coefficient after a step of so many rows with that mean divergence per token.

        It grows where the divergence was above the target, and shrinks where it was below, by at most a fifth. What is
        not finite says nothing, and leaves it as it is.
        """
        if self.target_nats is None or not math.isfinite(divergence_nats):
            return self
        error = min(max(divergence_nats / self.target_nats - 1.0, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, value=self.value * (1.0 + error * min(rows / self.horizon_rows, 1.0)))

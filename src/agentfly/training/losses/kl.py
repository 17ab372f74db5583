"""KL divergence of the policy from a reference, KL(policy || reference), in nats per token, and its adaptive weight.

`kl_estimate` uses only the sampled token and is unbiased over the policy's samples for some estimators. `full_kl` is
exact at each token and needs the logits of both models.

Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
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
"""Upper bound of ``low_variance``, in nats."""


def kl_estimate(estimator: SampledEstimator, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return an estimate at each sampled token; 0 where the mask is False; [N].

    * ``k1``: the difference of the log-probs. Unbiased, with high variance. Its gradient is 0 on average, so it has no
      effect in a loss.
    * ``k2``: half the squared difference. Biased where the two are far apart; its gradient is unbiased.
    * ``k3``: unbiased and never negative. Its gradient is the gradient of the reverse divergence.
    * ``low_variance``: ``k3``, clamped to `MAX_LOW_VARIANCE_KL` (verl: ``low_var_kl``).

    Args:
        estimator: one of these.
        logprobs: log-probs of the policy, with gradient; [N].
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
    """Return the k3 estimate: never negative, finite, and 0 where the mask is False; [N]."""
    difference = log_ratio(reference, logprobs, mask)
    return (difference.expm1() - difference).clamp(min=0.0)  # exp(x) - 1 would round small divergences away


def with_k2_gradient(values: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` with the gradient of the k2 estimator, which is unbiased; [N].

    verl denotes this by a ``+`` after the estimator's name. Source: https://arxiv.org/abs/2510.01555.
    """
    k2 = kl_estimate("k2", logprobs, reference, mask)
    return masked(values, mask).detach() + k2 - k2.detach()


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Return the exact divergence, summed over the vocabulary, with its own gradient.

    Tokens with a logit of minus infinity under the policy contribute 0. The logits of both models are kept in memory,
    so pass long batches in chunks.

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
"""Bound of the relative error of the divergence that the controller reacts to."""


@dataclass(frozen=True)
class AdaptiveKLController:
    """The weight of the divergence in a step; an immutable value that `updated` replaces after each step.

    Source: Ziegler and others, Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593,
    section 2.2.

    Attributes:
        value: the weight, per nat and token. Checkpoints contain it.
        target_nats: target of the mean divergence per token; None keeps the weight constant.
        horizon_rows: number of rows over which the weight can change by a fifth.
    """

    value: float
    target_nats: float | None = None
    horizon_rows: int = 10_000

    def updated(self, divergence_nats: float, rows: int) -> AdaptiveKLController:
        """Return the controller after a step of ``rows`` rows with this mean divergence per token.

        The weight grows if the divergence was above the target and shrinks if it was below, by at most a fifth. A
        divergence that is not finite is ignored.
        """
        if self.target_nats is None or not math.isfinite(divergence_nats):
            return self
        error = min(max(divergence_nats / self.target_nats - 1.0, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, value=self.value * (1.0 + error * min(rows / self.horizon_rows, 1.0)))

"""Divergence of the policy from a reference, KL(policy || reference) in nats, at each token.

Where the reference is the policy before training it holds the policy back, as a penalty in the loss or in the reward.
The estimates of `divergence` look at the sampled token alone, and are right on average over what the policy samples;
`full_divergence` is right at each token, and needs the logits of both.

Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from agentfly.training.losses.token_batch import log_ratio, masked

if TYPE_CHECKING:
    from torch import Tensor

SampledEstimator = Literal["k1", "k2", "k3", "low_variance"]

MOST_LOW_VARIANCE = 10.0
"""Nats above which ``low_variance`` does not go."""


def divergence(estimator: SampledEstimator, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate at each sampled token; 0 where the mask is False; [N].

    * ``k1``: the difference of the log-probs. Right on average, and noisy. Its gradient is 0 on average: in a loss it
      holds nothing back.
    * ``k2``: half its square. Wrong on average where the two are far apart, and its gradient is right.
    * ``k3``: never negative, and right on average. Its gradient is that of the divergence the other way round.
    * ``low_variance``: ``k3``, of which no token has more than `MOST_LOW_VARIANCE` (verl: ``low_var_kl``).

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
            return k3_divergence(logprobs, reference, mask)
        case "low_variance":
            return k3_divergence(logprobs, reference, mask).clamp(max=MOST_LOW_VARIANCE)
        case _:
            assert_never(estimator)


def k3_divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate that is never negative, finite, and 0 where the mask is False; [N]."""
    difference = log_ratio(reference, logprobs, mask)
    return (difference.expm1() - difference).clamp(min=0.0)  # exp(x) - 1 would round small divergences away


def with_gradient_of_k2(values: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``values``, whatever they were estimated by, with the gradient of ``k2``, which is right on average; [N].

    verl writes it as a ``+`` after the estimator's name. Source: https://arxiv.org/abs/2510.01555.
    """
    k2 = divergence("k2", logprobs, reference, mask)
    return masked(values, mask).detach() + k2 - k2.detach()


def full_divergence(logits: Tensor, reference_logits: Tensor) -> Tensor:
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

"""Divergence of the policy from a reference, KL(policy || reference), at each token.

Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfly.training.losses.token_batch import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


def k3_divergence(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate that is never negative; 0 where the mask is False; [N]."""
    difference = log_ratio(reference, logprobs, mask)
    return difference.exp() - 1.0 - difference

"""What an update says of the policy, by the names the field uses."""

from __future__ import annotations

from torch import Tensor

from agentfly.training.losses.divergence import k3_divergence
from agentfly.training.losses.token_batch import ClipRange, TokenBatch, TokenLoss
from agentfly.training.tally import Tally


def tally_policy(tally: Tally, batch: TokenBatch, policy: TokenLoss, entropy: Tensor, clip: ClipRange) -> None:
    """Count some tokens of an update towards its metrics; those that do not count are left out.

    Args:
        tally: where they are counted.
        batch: the tokens.
        policy: what the loss made of them.
        entropy: of the distribution each was chosen from, in nats; [N].
        clip: the bounds of the loss.
    """
    mask = batch.mask
    ratio, clipped = policy.ratio[mask], policy.clipped[mask]
    tally.mean("policy/entropy", entropy[mask])
    tally.mean("policy/loss", policy.loss[mask])
    tally.mean("policy/clip_fraction", clipped)
    tally.mean("policy/clip_fraction_low", clipped & (ratio < 1.0 - clip.low))
    tally.mean("policy/clip_fraction_high", clipped & (ratio > 1.0 + clip.high))
    tally.mean("policy/ratio_mean", ratio)
    tally.maximum("policy/ratio_max", ratio)
    tally.mean("policy/kl", k3_divergence(batch.old, batch.logprobs, mask)[mask])

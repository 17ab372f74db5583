"""Rollout correction: importance weights between the trainer's log-probs and the rollout log-probs, and their mismatch.

The two differ if sampler and trainer are different programs or number formats, or if rollouts ran ahead of updates. The
policy's ratio then refers to the trainer's log-probs before the update. The remaining factor, the trainer's probability
over the sampler's, weights each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.losses.aggregation import LOG_RATIO_LIMIT, masked, row_counts, row_means, row_sums

if TYPE_CHECKING:
    from torch import Tensor

    from agentfly.training.config.groups import CorrectionConfig


def mismatch_metrics(old: Tensor, behaviour: Tensor, mask: Tensor, row: Tensor) -> dict[str, float]:
    """Return distances between two sets of log-probs of the same tokens, all finite; empty if no token counts.

    The names after ``mismatch/`` are those of verl's ``rollout_corr/``, where they exist:

    * ``kl`` and ``k3_kl``: estimates of KL(sampler || trainer) in nats per token; the first may be negative.
    * ``logprob_diff_mean``, ``logprob_diff_max``: absolute difference of a token's log-probs, in nats.
    * ``ratio_mean``, ``ratio_max``: a token's probability under the trainer over that under the sampler.
    * ``training_ppl``, ``rollout_ppl``: mean over rows of the perplexity under the trainer and under the sampler;
      ``ppl_ratio``: mean over rows of their quotient; ``log_ppl_diff``, ``log_ppl_abs_diff``: mean over rows of the
      difference of their logarithms, and of its absolute value.
    * ``chi2_token``, ``chi2_seq``: mean squared ratio of tokens, and of whole rows, minus 1.

    Args:
        old: log-probs of the trainer, before the update; [N].
        behaviour: log-probs under which the tokens were sampled; [N].
        mask: bool, the tokens that count; [N].
        row: int64, the row of each token; [N].
    """
    if not bool(mask.any()):
        return {}
    old, behaviour = masked(old.detach().double(), mask), masked(behaviour.detach().double(), mask)
    difference = _bounded(old - behaviour)
    ratio = difference.exp()
    some = row_counts(mask, row) > 0
    surprise, expected = (_bounded(-row_means(values, mask, row)[some]) for values in (old, behaviour))
    of_rows = _bounded(row_sums(old - behaviour, mask, row)[some])
    metrics = {
        "kl": -difference[mask].mean(),
        "k3_kl": (ratio - 1.0 - difference)[mask].mean(),
        "logprob_diff_mean": difference[mask].abs().mean(),
        "logprob_diff_max": difference[mask].abs().max(),
        "ratio_mean": ratio[mask].mean(),
        "ratio_max": ratio[mask].max(),
        "training_ppl": surprise.exp().mean(),
        "rollout_ppl": expected.exp().mean(),
        "ppl_ratio": (surprise - expected).exp().mean(),
        "log_ppl_diff": (surprise - expected).mean(),
        "log_ppl_abs_diff": (surprise - expected).abs().mean(),
        "chi2_token": ratio[mask].square().mean() - 1.0,
        "chi2_seq": (2.0 * of_rows).exp().mean() - 1.0,
    }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def _bounded(values: Tensor) -> Tensor:
    return values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class RolloutCorrection:
    """The rollout correction of N tokens.

    Attributes:
        weights: factors of the token losses, without gradient; 0 where the mask is False; [N].
        mask: bool, the tokens that still count; [N].
        metrics: metrics of the mismatch and the weights; all finite.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]


def correct_rollouts(
    old: Tensor, behaviour: Tensor, mask: Tensor, row: Tensor, config: CorrectionConfig
) -> RolloutCorrection:
    """Return weights and mask of a batch's tokens.

    The ratio of a token is its own (``token``), the product over its row (``sequence``), or the geometric mean over its
    row (``sequence_mean``). With ``truncate``, the weight is the ratio clamped to the bounds. With ``mask``, tokens
    outside the bounds are masked, and the others have their ratio as weight.

    Sources: truncated, https://fengyao.notion.site/off-policy-rl ; masked by tokens, IcePop in
    https://arxiv.org/abs/2510.18855 ; masked by rows, https://richardli.xyz/rl-collapse . The metrics have the names of
    verl's ``rollout_corr_helper``, with ``mismatch/`` before them.

    Args:
        old: log-probs of the trainer, before the update, at the temperature of sampling; [N].
        behaviour: log-probs under which the tokens were sampled; [N].
        mask: bool, the tokens that count; [N].
        row: int64, the row of each token, from 0; rows are whole; [N].
        config: level, mode and bounds.
    """
    difference = masked(old.detach(), mask) - masked(behaviour, mask)
    if config.level == "sequence":
        difference = row_sums(difference, mask, row).index_select(0, row)
    elif config.level == "sequence_mean":
        difference = row_means(difference, mask, row).index_select(0, row)
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if config.mode == "truncate":
        weights, kept = ratio.clamp(min=config.effective_lower, max=config.upper), mask
    else:
        weights, kept = ratio, mask & (ratio >= config.effective_lower) & (ratio <= config.upper)
    weights = masked(weights, kept)
    metrics = mismatch_metrics(old, behaviour, mask, row)
    if metrics:
        metrics |= _weight_metrics(weights, ratio, mask, config) | _masked_fractions(kept, mask, row)
    return RolloutCorrection(weights=weights, mask=kept, metrics=metrics)


def _weight_metrics(weights: Tensor, ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> dict[str, float]:
    """Return metrics of the weights, 0 for masked tokens; the effective sample size is a fraction of the tokens."""
    weights, ratio = weights[mask].double(), ratio[mask].double()
    square = float(weights.square().mean())
    lower = config.lower if config.lower is not None else 1.0 / config.upper
    metrics = {
        "mean": float(weights.mean()),
        "std": float(weights.std(correction=0)),
        "min": float(weights.min()),
        "max": float(weights.max()),
        "eff_sample_size": float(weights.mean()) ** 2 / square if square else 0.0,
        "ratio_fraction_high": float((ratio > config.upper).double().mean()),
        "ratio_fraction_low": float((ratio < lower).double().mean()),
    }
    return {f"mismatch/rollout_is_{name}": value for name, value in metrics.items()}


def _masked_fractions(kept: Tensor, mask: Tensor, row: Tensor) -> dict[str, float]:
    """Return the fraction of masked tokens, and the fraction of rows with a masked token."""
    before, after = row_counts(mask, row), row_counts(kept, row)
    return {
        "mismatch/masked_fraction": 1.0 - float(after.sum()) / float(before.sum()),
        "mismatch/seq_masked_fraction": float((after < before).sum()) / float((before > 0).sum()),
    }

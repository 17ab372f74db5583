"""Rollout correction: importance weights between the trainer's log-probs and those under which tokens were sampled.

The two differ where sampler and trainer are different programs or formats, or where rollouts ran ahead of updates. The
policy's ratio is then taken to the trainer's log-probs before the update, and what is left, the trainer's probability
over the sampler's, weighs each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.losses.mismatch import mismatch_metrics
from agentfly.training.losses.row_sums import row_counts, row_means, row_sums
from agentfly.training.losses.token_batch import LOG_RATIO_LIMIT, masked

if TYPE_CHECKING:
    from torch import Tensor

    from agentfly.training.config.correction_config import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """What rollout correction says of N tokens.

    Attributes:
        weights: what each token's loss is multiplied by, without gradient, 0 where the mask is False; [N].
        mask: bool, the tokens that still count; [N].
        metrics: the mismatch and the weights, by their names in the metrics; all finite.
    """

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]


def correct(old: Tensor, behaviour: Tensor, mask: Tensor, row: Tensor, config: CorrectionConfig) -> Correction:
    """Weights and mask of a batch's tokens.

    The ratio of a token is its own, or for all tokens of a row the product of theirs (``sequence``) or its geometric
    mean (``sequence_mean``). With ``truncate`` the weight is the ratio, held within the bounds; with ``mask`` what is
    beyond them is left out, and the ratio is the weight of the rest.

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
        weights, kept = ratio.clamp(min=config.lowest, max=config.upper), mask
    else:
        weights, kept = ratio, mask & (ratio >= config.lowest) & (ratio <= config.upper)
    weights = masked(weights, kept)
    metrics = mismatch_metrics(old, behaviour, mask, row)
    if metrics:
        metrics |= _weight_metrics(weights, ratio, mask, config) | _masked_shares(kept, mask, row)
    return Correction(weights=weights, mask=kept, metrics=metrics)


def _weight_metrics(weights: Tensor, ratio: Tensor, mask: Tensor, config: CorrectionConfig) -> dict[str, float]:
    """Of the weights of all tokens, 0 for those left out; the effective sample size is a share of the tokens."""
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


def _masked_shares(kept: Tensor, mask: Tensor, row: Tensor) -> dict[str, float]:
    """Share of the tokens that are left out, and of the rows that lose some."""
    before, after = row_counts(mask, row), row_counts(kept, row)
    return {
        "mismatch/masked_fraction": 1.0 - float(after.sum()) / float(before.sum()),
        "mismatch/seq_masked_fraction": float((after < before).sum()) / float((before > 0).sum()),
    }

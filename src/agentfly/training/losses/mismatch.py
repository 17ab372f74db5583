"""Mismatch: how far the trainer's log-probs are from those under which the tokens were sampled, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfly.training.losses.row_sums import row_counts, row_means, row_sums
from agentfly.training.losses.token_batch import LOG_RATIO_LIMIT, masked

if TYPE_CHECKING:
    from torch import Tensor


def mismatch_metrics(old: Tensor, behaviour: Tensor, mask: Tensor, row: Tensor) -> dict[str, float]:
    """Distances between two sets of log-probs of the same tokens, all finite; empty if no token counts.

    Names after ``mismatch/`` are those of verl's ``rollout_corr/``, where it has them:

    * ``kl`` and ``k3_kl``: estimates of KL(sampler || trainer) in nats per token; the first may be negative.
    * ``logprob_diff_mean``, ``logprob_diff_max``: how far log-probs of a token are apart, in nats.
    * ``ratio_mean``, ``ratio_max``: a token's probability to the trainer over that to the sampler.
    * ``training_ppl``, ``rollout_ppl``: mean over rows of the perplexity to the trainer and to the sampler;
      ``ppl_ratio``: mean over rows of the first over the second; ``log_ppl_diff``, ``log_ppl_abs_diff``: mean over rows
      of the difference of their logarithms, and of its size.
    * ``chi2_token``, ``chi2_seq``: mean of the squared ratio of tokens, and of whole rows, less 1.

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

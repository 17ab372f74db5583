"""MetricAccumulator: means and maxima over the tokens of a batch, and the policy metrics of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly.training.losses.aggregation import ClipRange, TokenBatch, TokenLoss
from agentfly.training.losses.kl import k3_estimate


class MetricAccumulator:
    """Accumulates metrics over micro-batches. Values that are not finite are ignored, so every metric is finite."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def add_mean(self, name: str, values: Tensor) -> None:
        """Add values to a mean."""
        numbers = _finite(values)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(numbers.sum()), count + len(numbers))

    def add_max(self, name: str, values: Tensor) -> None:
        """Add nonnegative values to a maximum."""
        numbers = _finite(values)
        self._maxima[name] = max(self._maxima.get(name, 0.0), float(numbers.max()) if len(numbers) else 0.0)

    def metrics(self) -> dict[str, float]:
        """Return every mean and maximum by name; 0 if there was no finite value."""
        return {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()} | self._maxima


def _finite(values: Tensor) -> Tensor:
    numbers = values.detach().double().flatten()
    return numbers[torch.isfinite(numbers)]


def accumulate_policy_metrics(
    tally: MetricAccumulator, batch: TokenBatch, policy: TokenLoss, entropy: Tensor, clip: ClipRange
) -> None:
    """Add the counted tokens of a micro-batch to the metrics of an update.

    Args:
        tally: accumulates the metrics.
        batch: the tokens.
        policy: their policy loss.
        entropy: entropy of the distribution that each token was sampled from, in nats; [N].
        clip: the bounds of the loss.
    """
    mask = batch.mask
    ratio, clipped = policy.ratio[mask], policy.clipped[mask]
    tally.add_mean("policy/entropy", entropy[mask])
    tally.add_mean("policy/loss", policy.loss[mask])
    tally.add_mean("policy/clip_fraction", clipped)
    tally.add_mean("policy/clip_fraction_low", clipped & (ratio < 1.0 - clip.low))
    tally.add_mean("policy/clip_fraction_high", clipped & (ratio > 1.0 + clip.high))
    tally.add_mean("policy/ratio_mean", ratio)
    tally.add_max("policy/ratio_max", ratio)
    tally.add_mean("policy/kl", k3_estimate(batch.old, batch.logprobs, mask)[mask])

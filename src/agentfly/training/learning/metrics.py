"""Tally: means and maxima over the tokens of a batch, gathered micro-batch by micro-batch.

What an update says of the policy, by the names the field uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly.training.losses.aggregation import ClipRange, TokenBatch, TokenLoss
from agentfly.training.losses.kl import k3_estimate


class MetricAccumulator:
    """Gathers metrics. What is not finite is left out, so that every metric is finite."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def add_mean(self, name: str, values: Tensor) -> None:
        """Count values towards a mean."""
        numbers = _finite(values)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(numbers.sum()), count + len(numbers))

    def add_max(self, name: str, values: Tensor) -> None:
        """Count values, none of them negative, towards a maximum."""
        numbers = _finite(values)
        self._maxima[name] = max(self._maxima.get(name, 0.0), float(numbers.max()) if len(numbers) else 0.0)

    def metrics(self) -> dict[str, float]:
        """Every mean and maximum by name; 0 where there was no finite value."""
        return {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()} | self._maxima


def _finite(values: Tensor) -> Tensor:
    numbers = values.detach().double().flatten()
    return numbers[torch.isfinite(numbers)]


def accumulate_policy_metrics(
    tally: MetricAccumulator, batch: TokenBatch, policy: TokenLoss, entropy: Tensor, clip: ClipRange
) -> None:
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
    tally.add_mean("policy/entropy", entropy[mask])
    tally.add_mean("policy/loss", policy.loss[mask])
    tally.add_mean("policy/clip_fraction", clipped)
    tally.add_mean("policy/clip_fraction_low", clipped & (ratio < 1.0 - clip.low))
    tally.add_mean("policy/clip_fraction_high", clipped & (ratio > 1.0 + clip.high))
    tally.add_mean("policy/ratio_mean", ratio)
    tally.add_max("policy/ratio_max", ratio)
    tally.add_mean("policy/kl", k3_estimate(batch.old, batch.logprobs, mask)[mask])

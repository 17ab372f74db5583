"""KLCoefficient: how much a divergence counts, and how that follows the divergence that is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_MOST_ERROR = 0.2
"""A divergence counts as off its target by at most this share of it."""


@dataclass(frozen=True)
class KLCoefficient:
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

    def after(self, divergence_nats: float, rows: int) -> KLCoefficient:
        """The coefficient after a step of so many rows with that mean divergence per token.

        It grows where the divergence was above the target, and shrinks where it was below, by at most a fifth. What is
        not finite says nothing, and leaves it as it is.
        """
        if self.target_nats is None or not math.isfinite(divergence_nats):
            return self
        error = min(max(divergence_nats / self.target_nats - 1.0, -_MOST_ERROR), _MOST_ERROR)
        return replace(self, value=self.value * (1.0 + error * min(rows / self.horizon_rows, 1.0)))

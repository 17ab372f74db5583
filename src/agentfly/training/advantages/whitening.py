"""Whitening: advantages of mean 0 and variance 1 over the sampled tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.training.advantages.algorithm import Floats
from agentfly.training.equality import are_equal


def whitened(values: Sequence[Floats]) -> list[Floats]:
    """Values less their mean, over their sample standard deviation; both count every sampled token of the batch alike.

    So long trajectories weigh more in both than short ones. This is how REINFORCE++
    (https://arxiv.org/abs/2501.03262) normalizes over a batch, and how verl 0.9 does it (``masked_whiten``,
    with the divisor N - 1), but that verl adds 1e-8 to the variance. Where all values are equal but for rounding, all
    become 0.
    """
    import numpy as np

    tokens = np.concatenate([np.empty(0), *values])
    if not len(tokens) or are_equal(tokens.min(), tokens.max()):
        return [value * 0.0 for value in values]
    mean, std = tokens.mean(), tokens.std(ddof=1)
    return [(value - mean) / std for value in values]

"""Equality of rewards and of what is computed from them: numbers that differ by rounding alone are the same.

Optimizers such as AdamW, and estimators that divide by a standard deviation, make an update of full size from a
difference of any size. So a difference that rounding can explain has to count as none before they see it.

Whitening: advantages of mean 0 and variance 1 over the sampled tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentfly.training.advantages.algorithm import Floats

if TYPE_CHECKING:
    from agentfly.training.advantages.algorithm import Floats


RELATIVE_TOLERANCE = 1e-6
"""Share of the largest number, or of 1 where all are smaller, up to which a difference counts as rounding.

Rewards are often made of float32 numbers, which hold 7 digits, or of sums and differences of numbers of about 1.
"""


def tolerance(*numbers: float) -> float:
    """The difference up to which such numbers count as equal."""
    return RELATIVE_TOLERANCE * max(1.0, *(abs(number) for number in numbers))


def nearly_equal(lowest: float, highest: float) -> bool:
    """Whether numbers from ``lowest`` to ``highest`` are all equal."""
    return highest - lowest <= tolerance(lowest, highest)


def subtract_with_tolerance(values: Floats, others: Floats | float) -> Floats:
    """``values`` less ``others``, exactly 0 where the two are equal; in the shape of ``values``."""
    import numpy as np

    differences = values - others
    largest = np.maximum(1.0, np.maximum(np.abs(values), np.abs(others)))
    return np.where(np.abs(differences) <= RELATIVE_TOLERANCE * largest, 0.0, differences)


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Values less their mean, over their sample standard deviation; both count every sampled token of the batch alike.

    So long trajectories weigh more in both than short ones. This is how REINFORCE++
    (https://arxiv.org/abs/2501.03262) normalizes over a batch, and how verl 0.9 does it (``masked_whiten``,
    with the divisor N - 1), but that verl adds 1e-8 to the variance. Where all values are equal but for rounding, all
    become 0.
    """
    import numpy as np

    tokens = np.concatenate([np.empty(0), *values])
    if not len(tokens) or nearly_equal(tokens.min(), tokens.max()):
        return [value * 0.0 for value in values]
    mean, std = tokens.mean(), tokens.std(ddof=1)
    return [(value - mean) / std for value in values]

"""Numerics of advantages: comparison with a tolerance for rounding, and whitening.

AdamW, and estimators that divide by a standard deviation, turn a difference of any size into an update of full size.
Differences that rounding can explain must therefore become exactly 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.training.advantages.algorithm import Floats

RELATIVE_TOLERANCE = 1e-6
"""Differences up to this fraction of the largest number (at least of 1) count as rounding.

Rewards often come from float32 numbers with 7 digits, or from sums and differences of numbers of about 1.
"""


def tolerance(*numbers: float) -> float:
    """Return the largest difference at which these numbers count as equal."""
    return RELATIVE_TOLERANCE * max(1.0, *(abs(number) for number in numbers))


def nearly_equal(lowest: float, highest: float) -> bool:
    """Return whether all numbers between ``lowest`` and ``highest`` count as equal."""
    return highest - lowest <= tolerance(lowest, highest)


def subtract_with_tolerance(values: Floats, others: Floats | float) -> Floats:
    """Return ``values - others``, exactly 0 where the two count as equal; in the shape of ``values``."""
    import numpy as np

    differences = values - others
    largest = np.maximum(1.0, np.maximum(np.abs(values), np.abs(others)))
    return np.where(np.abs(differences) <= RELATIVE_TOLERANCE * largest, 0.0, differences)


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Return the values minus their mean over their sample standard deviation, both taken over all tokens of the batch.

    Long trajectories therefore weigh more than short ones. REINFORCE++ (https://arxiv.org/abs/2501.03262) and verl 0.9
    (``masked_whiten``, divisor N - 1) normalize in the same way, except that verl adds 1e-8 to the variance. If all
    values are equal up to rounding, the result is 0.
    """
    import numpy as np

    tokens = np.concatenate([np.empty(0), *values])
    if not len(tokens) or nearly_equal(tokens.min(), tokens.max()):
        return [value * 0.0 for value in values]
    mean, std = tokens.mean(), tokens.std(ddof=1)
    return [(value - mean) / std for value in values]

"""Equality of rewards and of what is computed from them: numbers that differ by rounding alone are the same.

Optimizers such as AdamW, and estimators that divide by a standard deviation, make an update of full size from a
difference of any size. So a difference that rounding can explain has to count as none before they see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentfly.training.advantages.algorithm import Floats

ROUNDING = 1e-6
"""Share of the largest number, or of 1 where all are smaller, up to which a difference counts as rounding.

Rewards are often made of float32 numbers, which hold 7 digits, or of sums and differences of numbers of about 1.
"""


def rounding(*numbers: float) -> float:
    """The difference up to which such numbers count as equal."""
    return ROUNDING * max(1.0, *(abs(number) for number in numbers))


def are_equal(lowest: float, highest: float) -> bool:
    """Whether numbers from ``lowest`` to ``highest`` are all equal."""
    return highest - lowest <= rounding(lowest, highest)


def difference(values: Floats, others: Floats | float) -> Floats:
    """``values`` less ``others``, exactly 0 where the two are equal; in the shape of ``values``."""
    import numpy as np

    differences = values - others
    largest = np.maximum(1.0, np.maximum(np.abs(values), np.abs(others)))
    return np.where(np.abs(differences) <= ROUNDING * largest, 0.0, differences)

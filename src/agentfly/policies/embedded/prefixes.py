"""The common prefix of two sequences of token ids."""

from __future__ import annotations

from array import array

import numpy as np


def common_prefix(left: array[int], right: array[int]) -> int:
    """Length of the longest common prefix of two arrays of type ``'i'``."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    different = np.flatnonzero(np.frombuffer(left, np.intc, length) != np.frombuffer(right, np.intc, length))
    return int(different[0]) if len(different) else length

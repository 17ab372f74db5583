"""Tally: means and maxima over the tokens of a batch, gathered micro-batch by micro-batch."""

from __future__ import annotations

import math

from torch import Tensor


class Tally:
    """Gathers metrics. What is not finite is left out, so that every metric is."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Count values towards a mean."""
        numbers = [number for number in values.detach().double().flatten().tolist() if math.isfinite(number)]
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + math.fsum(numbers), count + len(numbers))

    def maximum(self, name: str, values: Tensor) -> None:
        """Count values towards a maximum."""
        numbers = [number for number in values.detach().double().flatten().tolist() if math.isfinite(number)]
        self._maxima[name] = max([self._maxima.get(name, -math.inf), *numbers])

    def metrics(self) -> dict[str, float]:
        """Every mean and maximum by name; 0 where there was no finite value."""
        means = {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()}
        return means | {name: value if math.isfinite(value) else 0.0 for name, value in self._maxima.items()}

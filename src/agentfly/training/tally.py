"""Tally: means and maxima over the tokens of a batch, gathered micro-batch by micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Gathers metrics. What is not finite is left out, so that every metric is finite."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Count values towards a mean."""
        numbers = _finite(values)
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(numbers.sum()), count + len(numbers))

    def maximum(self, name: str, values: Tensor) -> None:
        """Count values, none of them negative, towards a maximum."""
        numbers = _finite(values)
        self._maxima[name] = max(self._maxima.get(name, 0.0), float(numbers.max()) if len(numbers) else 0.0)

    def metrics(self) -> dict[str, float]:
        """Every mean and maximum by name; 0 where there was no finite value."""
        return {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()} | self._maxima


def _finite(values: Tensor) -> Tensor:
    numbers = values.detach().double().flatten()
    return numbers[torch.isfinite(numbers)]

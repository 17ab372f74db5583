"""The adaptive KL coefficient: values computed by hand."""

from __future__ import annotations

import math

import pytest

from agentfly.training.losses.kl import AdaptiveKLController


@pytest.mark.parametrize(
    ("seen", "rows", "expected"),
    [
        (0.11, 100, 0.2 * (1 + 0.1 * 0.1)),  # a tenth above the target, over a tenth of the horizon
        (5.0, 100, 0.2 * (1 + 0.2 * 0.1)),
        (0.0, 100, 0.2 * (1 - 0.2 * 0.1)),
        (0.0, 20_000, 0.2 * 0.8),  # a batch beyond the horizon takes no more than a fifth
        (0.1, 100, 0.2),
        (math.nan, 100, 0.2),
    ],
)
def test_the_coefficient_changes_by_at_most_a_fifth(seen: float, rows: int, expected: float) -> None:
    assert AdaptiveKLController(0.2, target_nats=0.1, horizon_rows=1000).updated(seen, rows).value == pytest.approx(
        expected
    )


def test_without_a_target_it_stays() -> None:
    coefficient = AdaptiveKLController(0.2)
    assert coefficient.updated(9.0, 1000) == coefficient

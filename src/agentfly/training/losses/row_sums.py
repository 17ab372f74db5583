"""Sums and means over the tokens of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfly.training.losses.token_batch import masked

if TYPE_CHECKING:
    from torch import Tensor


def row_counts(mask: Tensor, row: Tensor) -> Tensor:
    """Number of tokens that count in each row; int64 [R], R one more than the highest row."""
    rows = int(row.max()) + 1 if row.numel() else 0
    return row.new_zeros(rows).scatter_add(0, row, mask.to(row.dtype))


def row_sums(values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """Sum of the values of each row where the mask is True; [R]."""
    rows = int(row.max()) + 1 if row.numel() else 0
    return values.new_zeros(rows).scatter_add(0, row, masked(values, mask))


def row_means(values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """Mean of the values of each row where the mask is True, 0 for a row without such tokens; [R]."""
    return row_sums(values, mask, row) / row_counts(mask, row).clamp(min=1)

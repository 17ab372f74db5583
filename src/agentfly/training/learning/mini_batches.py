"""How a batch is divided: mini-batches, each an update of its own, and micro-batches, each a pass through the model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentfly.training.rows import Row


def mini_batches(rows: Sequence[Row], count: int, seed: str) -> list[list[int]]:
    """Rows in parts of whole trajectories, as many in each as in any other, or one more.

    Which trajectory comes into which part is drawn from the seed; the rows of a part keep their order, so that those
    that begin alike stay together. There are fewer parts where there are fewer trajectories, and one in any case.

    Args:
        rows: all rows of a batch.
        count: number of parts.
        seed: where the draw comes from.

    Returns:
        The parts, each as indices of its rows.
    """
    trajectories = list(dict.fromkeys(row.rollout_id for row in rows))
    count = max(1, min(count, len(trajectories)))
    if count > 1:
        random.Random(seed).shuffle(trajectories)
    part_of = {rollout_id: number % count for number, rollout_id in enumerate(trajectories)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for index, row in enumerate(rows):
        parts[part_of[row.rollout_id]].append(index)
    return parts


def micro_batches(rows: Sequence[Row], indices: Sequence[int], tokens: int) -> list[list[int]]:
    """Consecutive rows in parts of at most ``tokens`` tokens; a longer row is a part of its own.

    Args:
        rows: all rows of a batch.
        indices: the rows to divide, in order.
        tokens: number of tokens of a part, at most.
    """
    parts: list[list[int]] = []
    filled = 0
    for index in indices:
        if not parts or filled + len(rows[index]) > tokens:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += len(rows[index])
    return parts

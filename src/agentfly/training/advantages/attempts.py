"""Attempt: a trajectory as estimators count it, once, however many rows it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentfly.training.advantages.algorithm import Evidence, Floats
from agentfly.training.rows import Row


@dataclass
class Attempt:
    """A trajectory of a batch: all its rows, those of memory and of subagents included.

    Attributes:
        rollout_id: the trajectory.
        reward: its reward, with what its tokens earned by themselves.
        tokens: number of its sampled tokens.
        rows: indices, in the batch, of its rows with sampled tokens.
    """

    rollout_id: str
    reward: float
    tokens: int = 0
    rows: list[int] = field(default_factory=list)


def attempts_by_group(evidence: Evidence) -> dict[str, list[Attempt]]:
    """The trajectories of each group. Those without a sampled token are none: there is nothing to judge in them."""
    groups: dict[str, dict[str, Attempt]] = {}
    for number, row in enumerate(evidence.rows):
        if not row.targets:
            continue
        group = groups.setdefault(row.group_id, {})
        attempt = group.setdefault(row.rollout_id, Attempt(row.rollout_id, row.reward))
        attempt.rows.append(number)
        attempt.tokens += len(row.targets)
        if evidence.token_rewards is not None:
            attempt.reward += float(evidence.token_rewards[number].sum())
    return {group_id: list(group.values()) for group_id, group in groups.items()}


def spread(rows: Sequence[Row], judged: Iterable[tuple[Attempt, float]]) -> list[Floats]:
    """The value of its trajectory at each sampled token of each row."""
    import numpy as np

    values = [np.zeros(len(row.targets)) for row in rows]
    for attempt, value in judged:
        for number in attempt.rows:
            values[number] += value
    return values

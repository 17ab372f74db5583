"""Batches of the learner: model scores, flat tensors of tokens, mini-batches, micro-batches and cancellation."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentfly.core.json_values import Brief
from agentfly.training.advantages import Floats
from agentfly.training.config.groups import CorrectionConfig
from agentfly.training.losses.rollout_correction import correct_rollouts
from agentfly.training.rows import Row


@dataclass(frozen=True, repr=False)
class ModelScores(Brief):
    """Model outputs for the sampled tokens of a batch before the update; None where the settings do not need them.

    Each is a sequence with one array per row and one value per sampled token.

    Attributes:
        old_logprobs: log-probs under the trained weights, before the update.
        values: the critic's value of the state in which each token was sampled, in units of reward.
        token_rewards: reward of each token: minus the KL penalty, with ``kl.where=reward``.
    """

    old_logprobs: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None
    token_rewards: Sequence[Floats] | None = None


@dataclass(frozen=True)
class FlatBatch:
    """All N sampled tokens of a batch, row by row, on the device of the model.

    Attributes:
        rollout_logprobs: log-probs under which the tokens were sampled; float32 [N].
        old_logprobs: log-probs in the denominator of the policy's ratio; float32 [N].
        advantages: float32 [N].
        mask: bool, the tokens that count; [N].
        weights: weights of rollout correction; float32 [N].
        row: int64, the row of each token; [N].
        starts: index of the first token of each row, followed by N.
        indices: int64, the index of each token in the batch that it was selected from; [N].
    """

    rollout_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    row: Tensor
    starts: list[int]
    indices: Tensor

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], advantages: Sequence[Floats], scores: ModelScores, device: torch.device
    ) -> FlatBatch:
        """Return the tokens of some rows. All of them count, with weight 1."""
        counts = [len(row.targets) for row in rows]
        rollout = flatten([row.target_logprobs for row in rows], device)
        return cls(
            rollout_logprobs=rollout,
            old_logprobs=rollout if scores.old_logprobs is None else flatten(scores.old_logprobs, device),
            advantages=flatten(advantages, device),
            mask=torch.ones(len(rollout), dtype=torch.bool, device=device),
            weights=torch.ones_like(rollout),
            row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts, dtype=torch.int64)).to(device),
            starts=np.cumsum([0, *counts]).tolist(),
            indices=torch.arange(len(rollout), device=device),
        )

    def with_rollout_correction(self, config: CorrectionConfig | None) -> tuple[FlatBatch, dict[str, float]]:
        """Return the tokens with weights and mask of rollout correction, and its metrics; unchanged without it."""
        if config is None:
            return self, {}
        correction = correct_rollouts(self.old_logprobs, self.rollout_logprobs, self.mask, self.row, config)
        return replace(self, weights=correction.weights, mask=correction.mask), correction.metrics

    def select_rows(self, indices: Sequence[int]) -> FlatBatch:
        """Return the tokens of some rows, in the given order; the rows are renumbered from 0."""
        spans = [torch.arange(self.starts[index], self.starts[index + 1]) for index in indices]
        counts = [len(span) for span in spans]
        where = torch.cat([*spans, torch.zeros(0, dtype=torch.int64)]).to(self.rollout_logprobs.device)
        numbers = torch.repeat_interleave(torch.arange(len(indices)), torch.tensor(counts, dtype=torch.int64))
        return FlatBatch(
            rollout_logprobs=self.rollout_logprobs[where],
            old_logprobs=self.old_logprobs[where],
            advantages=self.advantages[where],
            mask=self.mask[where],
            weights=self.weights[where],
            row=numbers.to(where.device),
            starts=np.cumsum([0, *counts]).tolist(),
            indices=where,
        )


def flatten(arrays: Sequence[Floats | Sequence[float]], device: torch.device) -> Tensor:
    """Concatenate arrays, one per row, to a tensor; float32 [N]."""
    joined = np.concatenate([np.zeros(0), *arrays]).astype(np.float32)
    return torch.from_numpy(joined).to(device)


def split_by_row(values: Tensor, rows: Sequence[Row]) -> list[Floats]:
    """Split a tensor over the sampled tokens of some rows [N] into arrays, one per row."""
    counts = [len(row.targets) for row in rows]
    return np.split(values.detach().double().cpu().numpy(), np.cumsum(counts)[:-1]) if counts else []


def mini_batches(rows: Sequence[Row], count: int, seed: str) -> list[list[int]]:
    """Divide rows into mini-batches of whole trajectories, whose numbers of trajectories differ by at most one.

    The seed determines the assignment. The rows of a part keep their order, so that rows with a common prefix stay
    together. The number of parts is at most the number of trajectories, and at least one.

    Args:
        rows: all rows of a batch.
        count: number of parts.
        seed: seed of the random assignment.

    Returns:
        The row indices of each part.
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
    """Divide rows into consecutive parts of at most ``tokens`` tokens; a longer row forms its own part.

    Args:
        rows: all rows of a batch.
        indices: the rows to divide, in order.
        tokens: maximum number of tokens of a part.
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


class UpdateCancelled(Exception):
    """The update was cancelled. The weights are those after the last complete optimizer step."""


def raise_if_cancelled(stop: threading.Event | None) -> None:
    """Raise if the event is set.

    Raises:
        UpdateCancelled: it is.
    """
    if stop is not None and stop.is_set():
        raise UpdateCancelled

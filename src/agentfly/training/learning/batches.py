"""Scores: what models say of the sampled tokens of a batch before it is learned from.

BatchTokens: what is known of each sampled token of a batch, as tensors, before a model is asked again.

How a batch is divided: mini-batches, each an update of its own, and micro-batches, each a pass through the model.

How learning is told to stop.
"""

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
    """What models say of the sampled tokens of a batch before it is learned from; only what the settings ask for.

    Each is one array a row, with one value for each of the row's sampled tokens.

    Attributes:
        old_logprobs: log-probs under the trained weights, before the update.
        values: the critic's value of the state in which each token was chosen, in units of reward.
        token_rewards: what is added to the reward at each token: the penalty for diverging from the policy before
            training, where it is taken from the reward.
    """

    old_logprobs: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None
    token_rewards: Sequence[Floats] | None = None


@dataclass(frozen=True)
class FlatBatch:
    """All N sampled tokens of a batch, row by row, on the device where it is learned from.

    Attributes:
        rollout_logprobs: log-probs under which they were sampled; float32 [N].
        old_logprobs: log-probs that the policy's ratio is taken to; float32 [N].
        advantages: float32 [N].
        mask: bool, the tokens that count; [N].
        weights: what rollout correction weighs them by; float32 [N].
        row: int64, the row of each; [N].
        starts: for each row, the index of its first token here, and at the end N.
        indices: int64, the index of each in the tokens that these were taken from; [N].
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
        """The tokens of some rows, all of which count, with weights of 1."""
        counts = [len(row.targets) for row in rows]
        behaviour = flatten([row.target_logprobs for row in rows], device)
        return cls(
            rollout_logprobs=behaviour,
            old_logprobs=behaviour if scores.old_logprobs is None else flatten(scores.old_logprobs, device),
            advantages=flatten(advantages, device),
            mask=torch.ones(len(behaviour), dtype=torch.bool, device=device),
            weights=torch.ones_like(behaviour),
            row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts, dtype=torch.int64)).to(device),
            starts=np.cumsum([0, *counts]).tolist(),
            indices=torch.arange(len(behaviour), device=device),
        )

    def with_rollout_correction(self, config: CorrectionConfig | None) -> tuple[FlatBatch, dict[str, float]]:
        """The tokens as rollout correction weighs them or leaves them out, with its metrics; as they are without it."""
        if config is None:
            return self, {}
        correction = correct_rollouts(self.old_logprobs, self.rollout_logprobs, self.mask, self.row, config)
        return replace(self, weights=correction.weights, mask=correction.mask), correction.metrics

    def select_rows(self, indices: Sequence[int]) -> FlatBatch:
        """The tokens of some rows, in that order; rows are counted from 0 again."""
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
    """Arrays, one a row, as one tensor; float32 [N]."""
    joined = np.concatenate([np.zeros(0), *arrays]).astype(np.float32)
    return torch.from_numpy(joined).to(device)


def split_by_row(values: Tensor, rows: Sequence[Row]) -> list[Floats]:
    """A tensor of all sampled tokens of some rows [N] as arrays, one a row."""
    counts = [len(row.targets) for row in rows]
    return np.split(values.detach().double().cpu().numpy(), np.cumsum(counts)[:-1]) if counts else []


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


class UpdateCancelled(Exception):
    """Learning was told to stop, and left the weights as its last whole update had made them."""


def raise_if_cancelled(stop: threading.Event | None) -> None:
    """Raise if the event is set.

    Raises:
        UpdateStopped: it is.
    """
    if stop is not None and stop.is_set():
        raise UpdateCancelled

"""BatchTokens: what is known of each sampled token of a batch, as tensors, before a model is asked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agentfly.training.advantages import Floats
from agentfly.training.config.correction_config import CorrectionConfig
from agentfly.training.learning.scores import Scores
from agentfly.training.losses.correction import correct
from agentfly.training.rows import Row


@dataclass(frozen=True)
class BatchTokens:
    """All N sampled tokens of a batch, row by row, on the device where it is learned from.

    Attributes:
        behaviour: log-probs under which they were sampled; float32 [N].
        old: log-probs that the policy's ratio is taken to; float32 [N].
        advantages: float32 [N].
        mask: bool, the tokens that count; [N].
        weights: what rollout correction weighs them by; float32 [N].
        row: int64, the row of each; [N].
        starts: for each row, the index of its first token here, and at the end N.
        places: int64, the index of each in the tokens that these were taken from; [N].
    """

    behaviour: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    row: Tensor
    starts: list[int]
    places: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], advantages: Sequence[Floats], scores: Scores, device: torch.device) -> BatchTokens:
        """The tokens of some rows, all of which count, with weights of 1."""
        counts = [len(row.targets) for row in rows]
        behaviour = flat([row.target_logprobs for row in rows], device)
        return cls(
            behaviour=behaviour,
            old=behaviour if scores.old_logprobs is None else flat(scores.old_logprobs, device),
            advantages=flat(advantages, device),
            mask=torch.ones(len(behaviour), dtype=torch.bool, device=device),
            weights=torch.ones_like(behaviour),
            row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts, dtype=torch.int64)).to(device),
            starts=np.cumsum([0, *counts]).tolist(),
            places=torch.arange(len(behaviour), device=device),
        )

    def corrected(self, config: CorrectionConfig | None) -> tuple[BatchTokens, dict[str, float]]:
        """The tokens as rollout correction weighs them or leaves them out, with its metrics; as they are without it."""
        if config is None:
            return self, {}
        correction = correct(self.old, self.behaviour, self.mask, self.row, config)
        return replace(self, weights=correction.weights, mask=correction.mask), correction.metrics

    def of_rows(self, indices: Sequence[int]) -> BatchTokens:
        """The tokens of some rows, in that order; rows are counted from 0 again."""
        spans = [torch.arange(self.starts[index], self.starts[index + 1]) for index in indices]
        counts = [len(span) for span in spans]
        where = torch.cat([*spans, torch.zeros(0, dtype=torch.int64)]).to(self.behaviour.device)
        numbers = torch.repeat_interleave(torch.arange(len(indices)), torch.tensor(counts, dtype=torch.int64))
        return BatchTokens(
            behaviour=self.behaviour[where],
            old=self.old[where],
            advantages=self.advantages[where],
            mask=self.mask[where],
            weights=self.weights[where],
            row=numbers.to(where.device),
            starts=np.cumsum([0, *counts]).tolist(),
            places=where,
        )


def flat(arrays: Sequence[Floats | Sequence[float]], device: torch.device) -> Tensor:
    """Arrays, one a row, as one tensor; float32 [N]."""
    joined = np.concatenate([np.zeros(0), *arrays]).astype(np.float32)
    return torch.from_numpy(joined).to(device)


def by_row(values: Tensor, rows: Sequence[Row]) -> list[Floats]:
    """A tensor of all sampled tokens of some rows [N] as arrays, one a row."""
    counts = [len(row.targets) for row in rows]
    return np.split(values.detach().double().cpu().numpy(), np.cumsum(counts)[:-1]) if counts else []

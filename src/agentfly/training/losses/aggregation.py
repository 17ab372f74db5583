"""TokenBatch: sampled tokens, with what a policy loss needs to know of each, and TokenLoss, what it makes of them.

What stands where the mask is False, NaN and infinities included, reaches neither value nor gradient: it is replaced
before anything is computed from it, since a NaN that is multiplied by 0 stays NaN.

Sums and means over the tokens of each row.

Aggregation: how the losses of a batch's tokens become one number, whatever parts the batch is computed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0
"""Differences of log-probs are held within this, so that a ratio, and with it a loss, is always finite."""


@dataclass(frozen=True)
class TokenBatch:
    """N sampled tokens, those of a row together or not, with what a policy loss needs to know of each.

    Attributes:
        logprobs: log-probs under the weights that are trained, with their gradient; [N].
        old: log-probs that the ratio is taken to; [N]. They are those under which the tokens were sampled, or, with
            rollout correction, the trainer's own before the update.
        advantages: [N].
        mask: bool, the tokens that count; [N].
        row: int64, the row of each token, from 0; [N]. Rows are whole: no other batch holds tokens of them.
        weights: what rollout correction weighs each token by, 1 without it; [N]. A token's loss is multiplied by it
            afterwards, and a loss need not look at it.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    row: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ClipRange:
    """How far a token's probability may move before it is no longer pushed on: ratios ``1 - low`` to ``1 + high``.

    Attributes:
        low: 1 sets no bound below.
        high: may be infinite.
        dual: where an advantage is negative, the loss is at most this many times it (dual clip); None sets no bound.
    """

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss before it is averaged.

    Attributes:
        loss: loss of each token, 0 where the mask is False; [N].
        ratio: probability of each token now over the old one, or the mean of that over its row, 1 where the mask is
            False; [N].
        clipped: bool, the tokens that the clipping has to do with; [N].
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``values`` where the mask is True, and ``fill``, with no gradient, elsewhere."""
    return values.masked_fill(~mask, fill)


def log_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Log of the probability under ``logprobs`` over that under ``old``, within bounds; 0 where the mask is False."""
    return (masked(logprobs, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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


AggregationName = Literal["token_mean", "sequence_mean", "sequence_token_mean", "constant"]


@dataclass(frozen=True)
class Aggregation:
    """A sum in which each token has its share, which is worked out from what the *whole* batch of an update holds.

    What micro-batches of whole rows give adds up to what the batch gives, in value and gradient, however it was split
    or padded.

    * ``token_mean``: the mean over all tokens (verl: ``token-mean``; DAPO, https://arxiv.org/abs/2503.14476).
    * ``sequence_mean``: the mean over rows of the sum over each row's tokens (verl: ``seq-mean-token-sum``).
    * ``sequence_token_mean``: the mean over rows of the mean over each row's tokens (verl: ``seq-mean-token-mean``;
      the first GRPO, https://arxiv.org/abs/2402.03300).
    * ``constant``: as ``sequence_mean``, and divided by ``row_tokens``, which depends on no batch (verl:
      ``seq-mean-token-sum-norm``; Dr.GRPO, https://arxiv.org/abs/2503.20783).

    Attributes:
        name: one of these.
        tokens: number of tokens that count in the whole batch.
        rows: number of rows of the whole batch with a token that counts.
        row_tokens: what ``constant`` divides by, in tokens.
    """

    name: AggregationName
    tokens: int
    rows: int
    row_tokens: int = 1

    def __call__(self, values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
        """What some rows of the batch add to the batch's number; 0 if no token counts.

        Args:
            values: one value a token, such as losses; [N].
            mask: bool, the tokens that count; [N].
            row: int64, the row of each token, from 0; [N]. Rows are whole.
        """
        values = masked(values, mask)
        match self.name:
            case "token_mean":
                return values.sum() / max(self.tokens, 1)
            case "sequence_mean":
                return values.sum() / max(self.rows, 1)
            case "sequence_token_mean":
                return (values / row_counts(mask, row).clamp(min=1)[row]).sum() / max(self.rows, 1)
            case "constant":
                return values.sum() / (max(self.rows, 1) * self.row_tokens)
            case _:
                assert_never(self.name)

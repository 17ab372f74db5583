"""Aggregation of token losses: the inputs and results of losses, masking, sums per row, and the reduction to a number.

Values where the mask is False, including NaN and infinity, affect neither values nor gradients. They are replaced
before any computation, because NaN times 0 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_LIMIT = 20.0
"""Differences of log-probs are clamped to this magnitude, so that ratios and losses are always finite."""


@dataclass(frozen=True)
class TokenBatch:
    """N sampled tokens with the inputs of a policy loss. Tokens of a row need not be consecutive.

    Attributes:
        logprobs: log-probs under the trained weights, with gradient; [N].
        old: log-probs in the denominator of the ratio; [N]. They are the rollout log-probs, or with rollout correction
            the trainer's own log-probs before the update.
        advantages: [N].
        mask: bool, the tokens that count; [N].
        row: int64, the row of each token, from 0; [N]. Rows are complete: no other batch contains their tokens.
        weights: weights of rollout correction, 1 without it; [N]. The caller multiplies the loss by them afterwards.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    row: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ClipRange:
    """The range of ratios, ``1 - low`` to ``1 + high``, outside which a token gets no further push.

    Attributes:
        low: 1 sets no lower bound.
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
        ratio: new over old probability of each token, or the mean over its row; 1 where the mask is False; [N].
        clipped: bool, the tokens that clipping affects; [N].
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def masked(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``values`` where the mask is True, and ``fill`` without gradient elsewhere."""
    return values.masked_fill(~mask, fill)


def log_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return ``logprobs - old``, clamped to `LOG_RATIO_LIMIT`; 0 where the mask is False."""
    return (masked(logprobs, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def row_counts(mask: Tensor, row: Tensor) -> Tensor:
    """Return the number of counted tokens in each row; int64 [R], where R is the highest row plus 1."""
    rows = int(row.max()) + 1 if row.numel() else 0
    return row.new_zeros(rows).scatter_add(0, row, mask.to(row.dtype))


def row_sums(values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """Return the sum of each row's values where the mask is True; [R]."""
    rows = int(row.max()) + 1 if row.numel() else 0
    return values.new_zeros(rows).scatter_add(0, row, masked(values, mask))


def row_means(values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """Return the mean of each row's values where the mask is True, 0 for a row without such tokens; [R]."""
    return row_sums(values, mask, row) / row_counts(mask, row).clamp(min=1)


AggregationName = Literal["token_mean", "sequence_mean", "sequence_token_mean", "constant"]


@dataclass(frozen=True)
class Aggregation:
    """A weighted sum over tokens. The weights depend on the *whole* batch of an update.

    The results of micro-batches of complete rows add up to the result of the batch, in value and gradient.

    * ``token_mean``: the mean over all tokens (verl: ``token-mean``; DAPO, https://arxiv.org/abs/2503.14476).
    * ``sequence_mean``: the mean over rows of the sum over each row's tokens (verl: ``seq-mean-token-sum``).
    * ``sequence_token_mean``: the mean over rows of the mean over each row's tokens (verl: ``seq-mean-token-mean``;
      the first GRPO, https://arxiv.org/abs/2402.03300).
    * ``constant``: ``sequence_mean`` divided by the fixed number ``row_tokens`` (verl: ``seq-mean-token-sum-norm``;
      Dr.GRPO, https://arxiv.org/abs/2503.20783).

    Attributes:
        name: one of these.
        tokens: number of counted tokens in the whole batch.
        rows: number of rows of the whole batch with a counted token.
        row_tokens: divisor of ``constant``, in tokens.
    """

    name: AggregationName
    tokens: int
    rows: int
    row_tokens: int = 1

    def __call__(self, values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
        """Return the contribution of some rows to the batch's result; 0 if no token counts.

        Args:
            values: one value per token, such as losses; [N].
            mask: bool, the tokens that count; [N].
            row: int64, the row of each token, from 0; [N]. Rows are complete.
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

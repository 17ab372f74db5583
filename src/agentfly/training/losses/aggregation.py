"""Aggregation: how the losses of a batch's tokens become one number, whatever parts the batch is computed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

from agentfly.training.losses.row_sums import row_counts
from agentfly.training.losses.token_batch import masked

if TYPE_CHECKING:
    from torch import Tensor

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

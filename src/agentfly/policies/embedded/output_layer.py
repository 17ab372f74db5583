"""OutputLayer: hidden states to logits, in sampling and in scoring alike, with some ids ruled out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

_RULED_OUT = "agentfly_ruled_out_ids"
"""Where a model keeps which ids are ruled out. Copies of the model keep it too, and its files do not."""

_LOGIT = -1e30
"""The logit of an id that is ruled out: its probability is 0, also at high temperatures, and 0 times it is a number."""


class OutputLayer:
    """The output layer of a causal language model.

    Args:
        model: the model, with what `rule_out` has ruled out for it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layer: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._ruled_out: Sequence[int] = getattr(model, _RULED_OUT, ())
        self._at = torch.tensor(self._ruled_out, dtype=torch.long, device=model.device)

    @property
    def rows(self) -> int:
        """How many ids there is a logit for."""
        return int(self._layer.weight.shape[0])  # type: ignore[index]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [N, rows] of hidden states [N, hidden]; those of ids that are ruled out have no probability."""
        logits: torch.Tensor = self._layer(states)
        if not self._ruled_out:
            return logits
        return logits.index_fill_(-1, self._at, max(_LOGIT, torch.finfo(logits.dtype).min))

    def require_possible(self, ids: torch.Tensor) -> None:
        """Raise unless all of some ids can be sampled.

        Raises:
            ValueError: one of them is ruled out.
        """
        if self._ruled_out and bool((found := torch.isin(ids, self._at)).any()):
            raise ValueError(
                f"The id {int(ids[found][0])} is never sampled from this model: no token of its tokenizer has it, or "
                "only images have it. So it has no log-prob. Was the row sampled from another model?"
            )


def rule_out(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Have a model neither sample nor score some ids: they leave the distribution, whose rest is normalised.

    A model has one distribution only: what samples, what is trained, and what either is compared with must agree on it.
    """
    setattr(model, _RULED_OUT, tuple(ids))

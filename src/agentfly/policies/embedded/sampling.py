"""Sampling from logits, with log-probs under the same distribution, and the output layer that makes the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from agentfly.policies.policy import SamplingParams

_BLOCK = 256
"""Tokens of a block of the vocabulary in `_invert`."""


def sample(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token for each row by inverting its cumulative distribution.

    Suppressed tokens have no probability. The logits are divided by the temperature, then cut to the ``top_k`` most
    likely tokens, then to the smallest set of most likely tokens with ``top_p`` of the remaining mass. The log-prob of
    the token is taken under this distribution. At temperature 0 the most likely token is taken. Its log-prob is the one
    at temperature 1 without cuts, because under the distribution of temperature 0 it would always be 0.

    Args:
        logits: [n, vocabulary].
        samplings: how to sample each row.
        uniforms: a number in [0, 1) for each row. The same number and logits give the same token.

    Returns:
        Token ids [n], their log-probs [n], and their log-probs at temperature 1 without cuts and suppression [n], both
        in float32.
    """
    raw = torch.log_softmax(logits.float(), dim=-1)
    logprobs = _without_suppressed(raw, samplings)
    if any(how.temperature not in (0.0, 1.0) for how in samplings):
        temperatures = torch.tensor([how.temperature or 1.0 for how in samplings], device=logits.device)
        logprobs = torch.log_softmax(logprobs / temperatures[:, None], dim=-1)
    cut = [row for row, how in enumerate(samplings) if how.temperature > 0 and (how.top_p < 1 or how.top_k > 0)]
    if cut:
        logprobs = logprobs.clone() if logprobs is raw else logprobs
        logprobs[cut] = _cut(logprobs[cut], [samplings[row] for row in cut])
    ids = _invert(logprobs.exp(), torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    if any(how.temperature == 0 for how in samplings):
        greedy = torch.tensor([how.temperature == 0 for how in samplings], device=logits.device)
        ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0], raw.gather(1, ids[:, None])[:, 0]


def _without_suppressed(logprobs: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Return log-probs with all suppressed tokens at -inf, normalised again."""
    suppressed = [(row, token) for row, how in enumerate(samplings) for token in how.suppressed_ids]
    if not suppressed:
        return logprobs
    indices = torch.tensor(suppressed, device=logprobs.device)
    masked = logprobs.clone()
    masked[indices[:, 0], indices[:, 1]] = float("-inf")
    return torch.log_softmax(masked, dim=-1)


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token of each row [n, vocabulary] at which its share ``uniforms`` [n] of the mass is reached.

    First the block of tokens is found, then the token in it. A running sum over the whole vocabulary would be slow in
    double precision, and inexact for unlikely tokens in single precision.
    """
    rows, size = probabilities.shape
    blocks = torch.nn.functional.pad(probabilities, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    masses = blocks.sum(dim=-1, dtype=torch.float64)
    block, before = _first_beyond(masses, uniforms * masses.sum(dim=-1))
    chosen = blocks[torch.arange(rows, device=blocks.device), block].double()
    token, _ = _first_beyond(chosen, uniforms * masses.sum(dim=-1) - before)
    return block * _BLOCK + token


def _first_beyond(masses: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per row [n, k] the first index at which the running sum exceeds the point [n], and the sum before it.

    The index always has mass, even if rounding puts the point at the end of all mass.
    """
    sums = masses.cumsum(dim=-1)
    total = sums[:, -1]
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total))).clamp(min=0)
    index = torch.searchsorted(sums, points[:, None], right=True).clamp_(max=masses.shape[1] - 1)
    return index[:, 0], (sums - masses).gather(1, index)[:, 0]


def _cut(logprobs: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Return log-probs with all tokens outside top-k and top-p at -inf, normalised again."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    size = logprobs.shape[-1]
    keep = torch.tensor([min(how.top_k or size, size) for how in samplings], device=logprobs.device)
    beyond = torch.arange(size, device=logprobs.device) >= keep[:, None]
    ordered = torch.log_softmax(ordered.masked_fill(beyond, float("-inf")), dim=-1)
    top_p = torch.tensor([how.top_p for how in samplings], device=logprobs.device)
    probabilities = ordered.exp()
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    # A top_p of 1 keeps everything despite rounding of the sum. The most likely token is always kept.
    beyond = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    beyond[:, 0] = False
    ordered = torch.log_softmax(ordered.masked_fill(beyond, float("-inf")), dim=-1)
    return torch.empty_like(logprobs).scatter_(1, order, ordered)


_RULED_OUT = "agentfly_ruled_out_ids"
"""Attribute of a model with its suppressed ids. Copies of the model have it, too; its files do not."""

_LOGIT = -1e30
"""The logit of a suppressed id: its probability is 0, even at high temperatures, and 0 times it is not NaN."""


class OutputLayer:
    """The output layer of a causal language model.

    Args:
        model: the model. Ids that `suppress_ids` has suppressed have no probability.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layer: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._ruled_out: Sequence[int] = getattr(model, _RULED_OUT, ())
        self._at = torch.tensor(self._ruled_out, dtype=torch.long, device=model.device)

    @property
    def rows(self) -> int:
        """Number of ids with a logit."""
        return int(self._layer.weight.shape[0])  # type: ignore[index]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [N, rows] of hidden states [N, hidden]. Suppressed ids have no probability."""
        logits: torch.Tensor = self._layer(states)
        if not self._ruled_out:
            return logits
        return logits.index_fill_(-1, self._at, max(_LOGIT, torch.finfo(logits.dtype).min))

    def require_sampleable(self, ids: torch.Tensor) -> None:
        """Check that no id is suppressed.

        Raises:
            ValueError: an id is suppressed.
        """
        if self._ruled_out and bool((found := torch.isin(ids, self._at)).any()):
            raise ValueError(
                f"The id {int(ids[found][0])} is never sampled from this model: no token of its tokenizer has it, or "
                "only images have it. So it has no log-prob. Was the row sampled from another model?"
            )


def suppress_ids(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Suppress ids of a model in sampling and scoring. The other tokens share their probability.

    The ids belong to the model, so that sampling, training and references all use the same distribution.
    """
    setattr(model, _RULED_OUT, tuple(ids))

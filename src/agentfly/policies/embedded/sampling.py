"""Drawing tokens from logits, with their log-probs under the very distribution they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentfly.policies.policy import SamplingParams

_BLOCK = 256
"""Tokens of a block of the vocabulary in `_invert`."""


def sample(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token for each row by inverting its cumulative distribution.

    Barred tokens have no probability. The logits are divided by the temperature, then cut to the ``top_k`` likeliest
    tokens, then to the smallest set of likeliest tokens that holds ``top_p`` of what is left. The log-prob is that of
    the token under this distribution. At temperature 0 the likeliest token is taken, and its log-prob is that at
    temperature 1 without cuts: under what it was taken from it would be 0, which tells nothing.

    Args:
        logits: [n, vocabulary].
        samplings: how to sample each row.
        uniforms: a number in [0, 1) for each row. The same number and logits give the same token.

    Returns:
        Token ids [n], their log-probs [n], and their log-probs at temperature 1 without cuts and bars [n], both in
        float32.
    """
    raw = torch.log_softmax(logits.float(), dim=-1)
    logprobs = _without_barred(raw, samplings)
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


def _without_barred(logprobs: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probs with all barred tokens at -inf, normalised again."""
    barred = [(row, token) for row, how in enumerate(samplings) for token in how.barred_ids]
    if not barred:
        return logprobs
    places = torch.tensor(barred, device=logprobs.device)
    masked = logprobs.clone()
    masked[places[:, 0], places[:, 1]] = float("-inf")
    return torch.log_softmax(masked, dim=-1)


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each row [n, vocabulary] in which its share ``uniforms`` [n] of the probability mass is reached.

    First the block of tokens is found, then the token in it: a running sum over the whole vocabulary would be slow in
    double precision, and in single precision would falsify the shares of the unlikely tokens.
    """
    rows, size = probabilities.shape
    blocks = torch.nn.functional.pad(probabilities, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    masses = blocks.sum(dim=-1, dtype=torch.float64)
    block, before = _first_beyond(masses, uniforms * masses.sum(dim=-1))
    chosen = blocks[torch.arange(rows, device=blocks.device), block].double()
    token, _ = _first_beyond(chosen, uniforms * masses.sum(dim=-1) - before)
    return block * _BLOCK + token


def _first_beyond(masses: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row [n, k], the first index at which the running sum exceeds the point [n], and the sum before that index.

    The index is never one of no mass, even where rounding puts the point at the end of all mass.
    """
    sums = masses.cumsum(dim=-1)
    total = sums[:, -1]
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total))).clamp(min=0)
    index = torch.searchsorted(sums, points[:, None], right=True).clamp_(max=masses.shape[1] - 1)
    return index[:, 0], (sums - masses).gather(1, index)[:, 0]


def _cut(logprobs: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probs with all tokens outside top-k and top-p at -inf, normalised again."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    size = logprobs.shape[-1]
    keep = torch.tensor([min(how.top_k or size, size) for how in samplings], device=logprobs.device)
    beyond = torch.arange(size, device=logprobs.device) >= keep[:, None]
    ordered = torch.log_softmax(ordered.masked_fill(beyond, float("-inf")), dim=-1)
    top_p = torch.tensor([how.top_p for how in samplings], device=logprobs.device)
    probabilities = ordered.exp()
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    # A top_p of 1 keeps everything, whatever rounding makes of the sum; the likeliest token is kept always.
    beyond = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    beyond[:, 0] = False
    ordered = torch.log_softmax(ordered.masked_fill(beyond, float("-inf")), dim=-1)
    return torch.empty_like(logprobs).scatter_(1, order, ordered)

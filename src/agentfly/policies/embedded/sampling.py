"""Drawing tokens from logits, with their log-probs under the very distribution they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentfly.errors import ConfigError
from agentfly.policies.policy import SamplingParams


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse settings that mean nothing.

    Raises:
        ConfigError: a value is out of its range.
    """
    for name, value, sound, asked in (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0, where 0 means all tokens"),
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
    ):
        if not sound:
            raise ConfigError(f"{name} is {value}; it must be {asked}.")


def sample(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row by inverting its cumulative distribution.

    The logits are divided by the temperature, then cut to the ``top_k`` likeliest tokens, then to the smallest set of
    likeliest tokens that holds ``top_p`` of what is left. The log-prob is that of the token under this distribution.
    At temperature 0 the likeliest token is taken, and its log-prob is that at temperature 1 without cuts: under what it
    was taken from it would be 0, which tells nothing.

    Args:
        logits: [n, vocabulary].
        samplings: how to sample each row.
        uniforms: a number in [0, 1) for each row. The same number and logits give the same token.

    Returns:
        Token ids [n], and log-probs [n] in float32.
    """
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    cut = [row for row, how in enumerate(samplings) if how.temperature > 0 and (how.top_p < 1 or how.top_k > 0)]
    if cut:
        logprobs[cut] = _cut(logprobs[cut], [samplings[row] for row in cut])
    # Double precision: a float32 running sum over a large vocabulary would shift the share of the unlikely tokens.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings], device=logits.device)
    ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


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

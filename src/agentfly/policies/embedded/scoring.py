"""score_tokens: differentiable log-probs and entropies of given tokens, for training and for checks.

Rows are packed (`packed_attention`): no padding goes through the linear layers, and common prefixes are computed once.
The output layer sees only the positions whose next token is scored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentfly.policies.embedded.packed_attention import enable_packed_attention, pack_rows, packed_hidden
from agentfly.policies.embedded.sampling import OutputLayer

WHOLE_LOGITS = 2**26
"""Up to this many logits are kept for the backward pass. More are computed again in it, chunk by chunk."""

CHUNK_LOGITS = 2**24
"""Number of logits in one chunk."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of N tokens by a model.

    Attributes:
        logprobs: log-prob of each token given all tokens before it, float32 [N].
        entropy: entropy in nats of the distribution the token was scored under, float32 [N].
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


def score_tokens(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    share_prefixes: bool = True,
) -> TokenScores:
    """Compute log-probs and entropies of chosen tokens of rows. Gradients are computed if they are enabled.

    Args:
        model: a causal language model.
        rows: token ids of each row.
        targets: for each row, the positions t >= 1, ascending, whose token is scored given the tokens before t.
        temperature: divides the logits, as it did in sampling.
        share_prefixes: compute common prefixes of rows once. False gives the same numbers, but slower.

    Returns:
        Scores of all targets, in the order of the rows; N is the number of targets.

    Raises:
        ValueError: rows and targets do not match, or the model cannot sample a token.
    """
    _check(rows, targets, temperature)
    hidden = hidden_states_before(model, rows, targets, share_prefixes=share_prefixes)
    return score_states(model, hidden, rows, targets, temperature=temperature)


def hidden_states_before(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    share_prefixes: bool = True,
) -> torch.Tensor:
    """Compute the last hidden states at the positions right before chosen tokens.

    Args:
        model: a causal language model, or the decoder of one.
        rows, targets, share_prefixes: see `score_tokens`.

    Returns:
        [N, hidden] in the order of the rows; N is the number of targets.
    """
    enable_packed_attention(model)
    scored = [index for index, positions in enumerate(targets) if len(positions)]
    if not scored:
        return torch.zeros(0, int(model.config.hidden_size), device=model.device, dtype=model.dtype)
    # Tokens from a row's last target on are not needed to score it.
    inputs = [rows[index][: targets[index][-1]] for index in scored]
    packed = pack_rows(inputs, share_prefixes=share_prefixes, device=model.device, dtype=model.dtype)
    sources = torch.cat(
        [indices[torch.tensor(targets[index]) - 1] for index, indices in zip(scored, packed.row_indices, strict=True)]
    ).to(model.device)
    return packed_hidden(model, packed.ids, packed.positions, packed.plan).index_select(0, sources)


def score_states(
    model: PreTrainedModel,
    states: torch.Tensor,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
) -> TokenScores:
    """Score the hidden states that `hidden_states_before` returned. For the arguments see `score_tokens`."""
    wanted = [row[position] for row, positions in zip(rows, targets, strict=True) for position in positions]
    tokens, head = torch.tensor(wanted, dtype=torch.long, device=model.device), OutputLayer(model)
    head.require_sampleable(tokens)
    return _score_hidden(head, states, tokens, temperature)


def _check(rows: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], temperature: float) -> None:
    if len(rows) != len(targets):
        raise ValueError(f"score_tokens got {len(rows)} rows but targets for {len(targets)}.")
    if temperature <= 0:
        raise ValueError(f"score_tokens needs a temperature above 0, not {temperature}.")
    for number, (row, positions) in enumerate(zip(rows, targets, strict=True)):
        ascending = all(left < right for left, right in itertools.pairwise(positions))
        if positions and (positions[0] < 1 or positions[-1] >= len(row) or not ascending):
            raise ValueError(f"The targets of row {number} must ascend within 1 to {len(row) - 1}.")


def _score_hidden(head: OutputLayer, hidden: torch.Tensor, wanted: torch.Tensor, temperature: float) -> TokenScores:
    """Score ``wanted`` [N] from hidden states [N, hidden], with a bounded number of logits at a time."""

    def score(states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(states).float()
        if temperature != 1.0:
            logits = logits / temperature
        scores: tuple[torch.Tensor, torch.Tensor] = _LogProbAndEntropy.apply(logits, tokens)  # type: ignore[no-untyped-call]
        return scores

    if not len(hidden):
        nothing = torch.zeros(0, device=hidden.device)
        return TokenScores(nothing, nothing)
    if len(hidden) * head.rows <= WHOLE_LOGITS:
        return TokenScores(*score(hidden, wanted))
    size = max(1, CHUNK_LOGITS // head.rows)
    parts = [
        checkpoint(score, states, tokens, use_reentrant=False)
        for states, tokens in zip(torch.split(hidden, size), torch.split(wanted, size), strict=True)
    ]
    return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


class _LogProbAndEntropy(torch.autograd.Function):
    """Log-softmax at one token per row, and entropy. Only the logits are kept for the backward pass.

    Let p be the softmax of the logits z, H its entropy and y the token. Then d log p_y / dz = onehot(y) - p and
    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalizer = logits.logsumexp(dim=-1)
        probabilities = (logits - normalizer[:, None]).exp_()
        entropy = normalizer - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(logits, tokens, normalizer, entropy)
        ctx.set_materialize_grads(False)
        return logits.gather(1, tokens[:, None])[:, 0] - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        by_logprob, by_entropy = gradients
        logits, tokens, normalizer, entropy = ctx.saved_tensors
        logprobs = logits - normalizer[:, None]
        if by_entropy is not None:
            gradient = (logprobs + entropy[:, None]).mul_(logprobs.exp_()).mul_(-by_entropy[:, None])
            probabilities = logprobs  # exponentiated in place
        else:
            gradient = torch.zeros_like(logits)
            probabilities = logprobs.exp_()
        if by_logprob is not None:
            gradient.sub_(probabilities.mul_(by_logprob[:, None]))
            gradient.scatter_add_(1, tokens[:, None], by_logprob[:, None])
        return gradient, None

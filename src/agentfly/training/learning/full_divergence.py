"""The divergence of two models in full: over the whole vocabulary, at each token that one of them sampled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentfly.policies.embedded.scoring import CHUNK_LOGITS


def full_divergence(
    head: nn.Linear, states: Tensor, reference_head: nn.Linear, reference_states: Tensor, temperature: float
) -> Tensor:
    """KL(policy || reference) in nats, with the gradient of the policy: exact, and so without the noise of sampling.

    Logits are made chunk by chunk, and again for the backward pass, so that no more than a few chunks of them are in
    memory at a time.

    Args:
        head, states: the policy's output layer, and its hidden states right before each token [N, hidden].
        reference_head, reference_states: those of the reference.
        temperature: divides the logits of both.

    Returns:
        float32 [N].
    """

    def divergence(own: Tensor, other: Tensor) -> Tensor:
        logprobs = (head(own).float() / temperature).log_softmax(dim=-1)
        reference = (reference_head(other).float() / temperature).log_softmax(dim=-1)
        summed: Tensor = (logprobs.exp() * (logprobs - reference)).sum(dim=-1)
        return summed

    if not len(states):
        return states.new_zeros(0, dtype=torch.float32)
    size = max(1, CHUNK_LOGITS // int(head.weight.shape[0]))
    chunks = zip(torch.split(states, size), torch.split(reference_states, size), strict=True)
    parts: list[Tensor] = [checkpoint(divergence, own, other, use_reentrant=False) for own, other in chunks]
    return torch.cat(parts)

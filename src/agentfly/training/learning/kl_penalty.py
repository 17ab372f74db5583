"""KLPenalty: the KL divergence from the policy before training, with the reference model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentfly.policies.embedded.sampling import OutputLayer
from agentfly.policies.embedded.scoring import CHUNK_LOGITS, hidden_states_before, score_tokens
from agentfly.training.config.groups import KLConfig
from agentfly.training.learning.trainable_model import adapters_disabled
from agentfly.training.losses.kl import AdaptiveKLController, full_kl, kl_estimate, with_k2_gradient
from agentfly.training.rows import Row


class KLPenalty:
    """The KL divergence from the policy before training (the reference), and its coefficient.

    If adapters are trained, the reference is the trained model with the adapters disabled, and takes no extra memory.
    Otherwise it is a frozen copy of the model in the same number format.

    Args:
        model: the trained model, with its weights and adapters before training.
        config: estimator, ``where`` and coefficient of the penalty.
        temperature: sampling temperature of the tokens.
        adapters: whether adapters are trained.

    Attributes:
        coefficient: the weight of the divergence, in reward (or loss) per nat and token.
    """

    def __init__(self, model: PreTrainedModel, config: KLConfig, *, temperature: float, adapters: bool) -> None:
        self._model = model
        self._copy = None if adapters else copy.deepcopy(model).requires_grad_(False)
        self._config = config
        self._temperature = temperature
        self.coefficient = AdaptiveKLController(config.coefficient, config.target_nats, config.horizon_rows)

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is subtracted from token rewards; otherwise it is added to the loss."""
        return self._config.where == "reward"

    @property
    def needs_logprobs(self) -> bool:
        """Whether `divergence` and `estimate` need the reference's log-probs of the sampled tokens."""
        return self._config.estimator != "full" or self._config.gradient == "k2"

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-probs of the sampled tokens of some rows under the reference; [N]."""
        with self._reference_model() as model, torch.no_grad():
            ids, targets = [row.ids for row in rows], [row.targets for row in rows]
            return score_tokens(model, ids, targets, temperature=self._temperature).logprobs

    def divergence(
        self, rows: Sequence[Row], states: Tensor, logprobs: Tensor, reference: Tensor | None, mask: Tensor
    ) -> Tensor:
        """Return the divergence at each sampled token of some rows, with the configured gradient; [N].

        Args:
            rows: the rows.
            states: the trained model's hidden states right before the tokens; [N, hidden].
            logprobs: log-probs of the tokens under the trained model; [N].
            reference: log-probs from `logprobs`, if needed; [N].
            mask: bool, the tokens that count; [N].
        """
        if self._config.estimator == "full":
            values = self._full_kl(rows, states).masked_fill(~mask, 0.0)
        else:
            assert reference is not None
            values = kl_estimate(self._config.estimator, logprobs, reference, mask)
        if self._config.gradient == "k2":
            assert reference is not None
            return with_k2_gradient(values, logprobs, reference, mask)
        return values

    def estimate(self, rows: Sequence[Row], old: Tensor | None, reference: Tensor | None) -> Tensor:
        """Return the divergence at each sampled token of some rows, before an update; [N].

        Args:
            rows: the rows.
            old: log-probs of their tokens under the weights before the update; not needed for ``full``.
            reference: log-probs of their tokens under the reference; not needed for ``full``.
        """
        if self._config.estimator == "full":
            states = hidden_states_before(self._model, [row.ids for row in rows], [row.targets for row in rows])
            return self._full_kl(rows, states)
        assert old is not None
        assert reference is not None
        return kl_estimate(self._config.estimator, old, reference, torch.ones_like(old, dtype=torch.bool))

    def _full_kl(self, rows: Sequence[Row], states: Tensor) -> Tensor:
        """Return the divergence over the whole vocabulary. Logits are computed in chunks, and again for backward."""
        with self._reference_model() as model, torch.no_grad():
            others = hidden_states_before(model, [row.ids for row in rows], [row.targets for row in rows])
        head, other_head = OutputLayer(self._model), OutputLayer(model)

        def of_chunk(own: Tensor, other: Tensor) -> Tensor:
            logits = head(own).float() / self._temperature
            with torch.no_grad(), self._reference_model():
                reference = other_head(other).float() / self._temperature
            return full_kl(logits, reference)

        size = max(1, CHUNK_LOGITS // head.rows)
        chunks = zip(torch.split(states, size), torch.split(others, size), strict=True)
        parts: list[Tensor] = [checkpoint(of_chunk, own, other, use_reentrant=False) for own, other in chunks]
        return torch.cat(parts)

    @contextmanager
    def _reference_model(self) -> Iterator[PreTrainedModel]:
        """Yield the reference model. Nothing else may use the trained model inside the block."""
        if self._copy is not None:
            yield self._copy
            return
        with adapters_disabled(self._model):
            yield self._model

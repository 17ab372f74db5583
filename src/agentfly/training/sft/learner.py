"""SupervisedLearner: what rows say, put into a model's weights by maximum likelihood of their sampled tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfly.policies.embedded.scoring import score_tokens
from agentfly.training.learning.activation_checkpointing import checkpointed, enable_checkpointing
from agentfly.training.learning.adapters import adapter_dropout, refuse_adapters, trainable_weights
from agentfly.training.learning.learning_rate import rate_share
from agentfly.training.learning.mini_batches import micro_batches
from agentfly.training.learning.optimizer import Optimizer
from agentfly.training.rows import Row
from agentfly.training.sft.config import SFTConfig

logger = logging.getLogger(__name__)

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class SupervisedLearner:
    """Updates a model in place: all its weights, or adapters that it puts into it.

    The loss of an update is the mean, over all sampled tokens of its rows, of minus the token's log-prob at temperature
    1. What was rendered around them is read and not learned.

    Args:
        model: the model.
        config: the settings.
        updates: number of updates that the whole run makes, which the schedule goes by.

    Attributes:
        done: how many updates were made, those before a resume included.

    Raises:
        ConfigError: the model cannot be trained as the settings say.
        PrerequisiteError: a package is missing.
    """

    def __init__(self, model: PreTrainedModel, config: SFTConfig, *, updates: int) -> None:
        refuse_adapters(model)
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        self._model = model
        self._config = config
        self._updates = updates
        self._optimizer = Optimizer(
            trainable_weights(model, config.lora, seed=config.seed),
            betas=_BETAS,
            epsilon=_EPSILON,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        self.done = 0

    def learn(self, rows: Sequence[Row]) -> dict[str, float]:
        """Make one update from some rows. Blocks.

        Returns:
            ``sft/loss`` before the update in nats a token, ``policy/grad_norm``, ``policy/learning_rate``, and the
            number of tokens learned, ``rows/sampled_tokens``.
        """
        tokens = sum(len(row.targets) for row in rows)
        rate = self._rate()
        total = 0.0
        with self._learning():
            for part in micro_batches(rows, range(len(rows)), self._config.micro_batch_tokens):
                loss = self._loss([rows[index] for index in part]) / tokens
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            norm = self._optimizer.update(rate)
        self.done += 1
        if not math.isfinite(norm):
            logger.warning("The gradient of update %d is not finite (norm %s); the weights stay.", self.done, norm)
        return {
            "sft/loss": total,
            "policy/grad_norm": norm,
            "policy/learning_rate": rate,
            "rows": float(len(rows)),
            "rows/sampled_tokens": float(tokens),
        }

    def loss(self, rows: Sequence[Row]) -> float:
        """The mean loss over the sampled tokens of some rows, in nats a token. Blocks; nothing is learned."""
        total = 0.0
        with torch.no_grad():
            for part in micro_batches(rows, range(len(rows)), self._config.micro_batch_tokens):
                total += float(self._loss([rows[index] for index in part]))
        return total / sum(len(row.targets) for row in rows)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's weights to go on exactly from here."""
        return {"done": self.done, "optimizer": self._optimizer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. The model's weights must have been loaded before."""
        self.done = state["done"]
        self._optimizer.load_state(state["optimizer"])

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        scores = score_tokens(self._model, [row.ids for row in rows], [row.targets for row in rows])
        return -scores.logprobs.float().sum()

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Gradients are gathered; layers compute twice, and adapters drop, where the settings say so."""
        dropping = adapter_dropout(self._model, self._config.lora, seed=self._config.seed, step=self.done)
        with self._optimizer.gathering(), checkpointed(self._model), dropping:
            yield

    def _rate(self) -> float:
        """The learning rate of the update at hand."""
        config, warmup = self._config, round(self._config.warmup_share * self._updates)
        share = rate_share(self.done, steps=self._updates, warmup=warmup, schedule=config.schedule)
        return config.learning_rate * share

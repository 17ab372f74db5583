"""Critic: the value model, which predicts the return from the state in which a token is sampled."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentfly.policies.embedded.scoring import hidden_states_before
from agentfly.training.advantages import Floats
from agentfly.training.advantages.algorithm import nearly_equal
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.batches import flatten, micro_batches, mini_batches, raise_if_cancelled, split_by_row
from agentfly.training.learning.optimizer import Optimizer
from agentfly.training.learning.trainable_model import gradient_checkpointing
from agentfly.training.losses.policy_losses import value_loss
from agentfly.training.metrics import MetricAccumulator
from agentfly.training.rows import Row

logger = logging.getLogger(__name__)


class Critic:
    """A copy of the policy's decoder with a scalar head, in units of reward, and its own optimizer.

    The value of a sampled token is read one position before it, so it does not depend on the token. The head starts at
    0, so every initial value is 0.

    Args:
        model: the policy's model with its weights before training, without adapters.
        config: the run's settings.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        self._decoder: PreTrainedModel = copy.deepcopy(decoder).requires_grad_()
        self._head = nn.Linear(int(model.config.hidden_size), 1, device=model.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._config = config
        self._optimizer = Optimizer(
            [*self._decoder.parameters(), *self._head.parameters()],
            betas=config.adam_betas,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

    def score(self, rows: Sequence[Row], stop: threading.Event | None = None) -> list[Floats]:
        """Return for each row the values of its sampled tokens.

        Raises:
            UpdateCancelled: ``stop`` was set.
        """
        parts = [torch.zeros(0)]
        with torch.no_grad():
            for part in micro_batches(rows, range(len(rows)), self._config.micro_batch_tokens):
                raise_if_cancelled(stop)
                parts.append(self._values([rows[index] for index in part]).cpu())
        return split_by_row(torch.cat(parts), rows)

    def learn(
        self,
        rows: Sequence[Row],
        values: Sequence[Floats],
        returns: Sequence[Floats],
        seed: str,
        stop: threading.Event | None = None,
    ) -> dict[str, float]:
        """Train the values towards the returns, with one update per mini-batch and epoch; returns metrics.

        Args:
            rows: the rows of a batch.
            values: their values from `score`.
            returns: the targets from the advantage estimator.
            seed: seed of the mini-batches.
            stop: if set, training is cancelled between two micro-batches.

        Raises:
            UpdateCancelled: ``stop`` was set.
        """
        tally = MetricAccumulator()
        with self._training_mode():
            for epoch in range(self._config.critic.updates_per_step):
                for part in mini_batches(rows, self._config.mini_batches, f"{seed}/{epoch}"):
                    self._update(part, rows, values, returns, tally, stop)
        explained = explained_variance(flatten(values, torch.device("cpu")), flatten(returns, torch.device("cpu")))
        return {
            "critic/learning_rate": self._config.critic.learning_rate,
            "critic/explained_variance": explained,
            **tally.metrics(),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, including the critic's weights."""
        return {
            "decoder": self._decoder.state_dict(),
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._decoder.load_state_dict(state["decoder"])
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state(state["optimizer"])

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        with self._optimizer.accumulating_gradients(), gradient_checkpointing(self._decoder):
            yield

    def _values(self, rows: Sequence[Row]) -> Tensor:
        states = hidden_states_before(self._decoder, [row.ids for row in rows], [row.targets for row in rows])
        values: Tensor = self._head(states.float())[:, 0]
        return values

    def _update(
        self,
        part: Sequence[int],
        rows: Sequence[Row],
        values: Sequence[Floats],
        returns: Sequence[Floats],
        tally: MetricAccumulator,
        stop: threading.Event | None,
    ) -> None:
        tokens = sum(len(rows[index].targets) for index in part)
        if not tokens:
            return
        for indices in micro_batches(rows, part, self._config.micro_batch_tokens):
            raise_if_cancelled(stop)
            now = self._values([rows[index] for index in indices])
            before = flatten([values[index] for index in indices], now.device)
            targets = flatten([returns[index] for index in indices], now.device)
            mask = torch.ones_like(now, dtype=torch.bool)
            loss = value_loss(now, before, targets, mask, self._config.critic.clip_value)
            (loss.loss.sum() / tokens).backward()  # type: ignore[no-untyped-call]
            tally.add_mean("critic/loss", loss.loss)
            tally.add_mean("critic/clip_fraction", loss.clipped)
            tally.add_mean("critic/value_mean", now)
            tally.add_mean("critic/return_mean", targets)
        norm = self._optimizer.step(self._config.critic.learning_rate)
        if math.isfinite(norm):
            tally.add_mean("critic/grad_norm", torch.tensor([norm]))
        else:
            logger.warning("The critic's gradient is not finite (norm %s); its weights stay.", norm)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return the fraction of the returns' variance that the values explain: 1 is perfect, 0 no better than their mean.

    It is 0 if all returns are equal up to rounding.
    """
    if len(returns) < 2 or nearly_equal(float(returns.min()), float(returns.max())):
        return 0.0
    return 1.0 - float((returns.double() - values.double()).var() / returns.double().var())

"""Learner: the optimizer over the weights that the policy samples from."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfly.errors import ConfigError
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.training.advantages import Floats
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.losses import LOSSES
from agentfly.training.losses.aggregation import Aggregation
from agentfly.training.losses.divergence import k3_divergence
from agentfly.training.losses.token_batch import ClipRange, TokenBatch
from agentfly.training.rows import Row
from agentfly.training.tally import Tally

logger = logging.getLogger(__name__)


class UpdateStopped(Exception):
    """An update was told to stop, and left the weights as they were."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are scored at once, with the row, log-probs and advantages of their N sampled tokens, in order."""

    rows: Sequence[Row]
    row: Tensor
    behaviour: Tensor
    advantages: Tensor
    reference: Tensor | None = None
    learns: bool = True


class Learner:
    """Updates a model in place by AdamW.

    Weights in a 16-bit format are updated through a copy in 32 bits, which also gathers the gradients: updates that
    are smaller than the format's steps add up instead of getting lost.

    Args:
        model: the model whose weights the policy samples from.
        config: the run's settings.
        temperature: divided the logits when the tokens were sampled.
        reference: the policy before training, for the divergence from it; needed if ``config.kl.coefficient`` is set.

    Attributes:
        steps: how many steps have been made, those before a resume included.
        updates: how many times this object has changed the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        *,
        temperature: float,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self._model = model.requires_grad_()
        self._config = config
        self._temperature = temperature
        self._reference = reference
        self._loss = LOSSES[config.loss]
        self._clip = ClipRange(config.clip_low, config.clip_high, config.clip_dual)
        self._weights = list(model.parameters())
        self._masters = [
            weight if weight.dtype == torch.float32 else torch.nn.Parameter(weight.detach().float())
            for weight in self._weights
        ]
        self._optimizer = torch.optim.AdamW(self._masters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.steps = 0
        self.updates = 0

    def learn(
        self, rows: Sequence[Row], advantages: Sequence[Floats], stop: threading.Event | None = None
    ) -> dict[str, float]:
        """Make one step: ``updates_per_step`` updates, each from all rows. Blocks; returns the step's metrics.

        A batch that has nothing to teach (no row, or advantages that are all 0 while neither entropy nor divergence
        counts) is measured, and makes no update.

        Args:
            rows: the rows, those of one group side by side.
            advantages: for each row, the advantages of its sampled tokens.
            stop: when it is set, the update gives up between two micro-batches.

        Raises:
            UpdateStopped: ``stop`` was set.
            ConfigError: a row holds images, of which the learner's models see but the placeholders.
        """
        _require_no_images(rows)
        rate = self._config.learning_rate * min(1.0, (self.steps + 1) / max(self._config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batches = self._micro_batches(rows, advantages)
        aggregation = Aggregation(
            self._config.aggregation,
            tokens=sum(len(row.targets) for row in rows),
            rows=sum(bool(row.targets) for row in rows),
            row_tokens=self._config.aggregation_tokens or 1,
        )
        tally = Tally()
        updates = self.updates
        try:
            if self._reference is not None:
                batches = [self._with_reference(batch, stop) for batch in batches]
            for number in range(self._config.updates_per_step):
                for batch in batches:
                    self._accumulate(batch, aggregation, tally, stop, first=number == 0)
                if any(batch.learns for batch in batches):
                    self._apply(tally)
        finally:
            self._model.zero_grad(set_to_none=True)
            self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        made = {"policy/learning_rate": rate, "policy/updates": float(self.updates - updates)}
        return {"policy/grad_norm": 0.0, **tally.metrics(), **made}

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's weights to go on exactly from here."""
        copies = [None if master is weight else master for master, weight in self._pairs()]
        return {"steps": self.steps, "optimizer": self._optimizer.state_dict(), "masters": copies}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. The model's weights must have been loaded before."""
        self.steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for (master, weight), saved in zip(self._pairs(), state["masters"], strict=True):
                master.copy_(weight if saved is None else saved)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._masters, self._weights, strict=True))

    # --- one step -----------------------------------------------------------------------------------------------------

    def _micro_batches(self, rows: Sequence[Row], advantages: Sequence[Floats]) -> list[MicroBatch]:
        """Rows in their order, so that those with a common beginning stay together; silent ones apart.

        A row whose advantages are all 0 has no gradient unless entropy or divergence count; it need not be
        differentiated, only measured.
        """
        always = self._config.entropy_coefficient > 0 or self._config.kl.coefficient > 0
        learning: list[tuple[Row, Floats]] = []
        silent: list[tuple[Row, Floats]] = []
        for row, values in zip(rows, advantages, strict=True):
            (learning if always or values.any() else silent).append((row, values))
        limit = self._config.micro_batch_tokens
        return [
            self._micro_batch(part, learns=pairs is learning)
            for pairs in (learning, silent)
            for part in split(pairs, limit)
        ]

    def _micro_batch(self, pairs: Sequence[tuple[Row, Floats]], *, learns: bool) -> MicroBatch:
        device = self._weights[0].device
        behaviour = [logprob for row, _ in pairs for logprob in row.target_logprobs]
        advantages = [value for _, values in pairs for value in values.tolist()]
        counts = torch.tensor([len(row.targets) for row, _ in pairs], device=device)
        return MicroBatch(
            rows=[row for row, _ in pairs],
            row=torch.repeat_interleave(counts),
            behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
            advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
            learns=learns,
        )

    def _score(self, model: PreTrainedModel, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        scores = score_tokens(
            model, [row.ids for row in rows], [row.targets for row in rows], temperature=self._temperature
        )
        return scores.logprobs.float(), scores.entropy.float()

    def _with_reference(self, batch: MicroBatch, stop: threading.Event | None) -> MicroBatch:
        assert self._reference is not None
        _give_up_if(stop)
        with torch.no_grad():
            logprobs, _ = self._score(self._reference, batch.rows)
        return replace(batch, reference=logprobs)

    def _accumulate(
        self, batch: MicroBatch, aggregation: Aggregation, tally: Tally, stop: threading.Event | None, *, first: bool
    ) -> None:
        """Add a micro-batch's share to the gradient of the whole batch's loss."""
        _give_up_if(stop)
        with torch.set_grad_enabled(batch.learns):
            logprobs, entropy = self._score(self._model, batch.rows)
            mask = torch.ones_like(logprobs, dtype=torch.bool)
            weights = torch.ones_like(batch.advantages)
            tokens = TokenBatch(logprobs, batch.behaviour, batch.advantages, mask, batch.row, weights)
            policy = self._loss(tokens, self._clip)
            loss = aggregation(policy.loss * weights, mask, batch.row)
            loss = loss - self._config.entropy_coefficient * aggregation(entropy, mask, batch.row)
            if batch.reference is not None:
                divergence = k3_divergence(logprobs, batch.reference, mask)
                loss = loss + self._config.kl.coefficient * aggregation(divergence, mask, batch.row)
                tally.mean("policy/reference_kl", divergence)
        if batch.learns:
            loss.backward()  # type: ignore[no-untyped-call]
            self._gather_gradients()
        tally.mean("policy/entropy", entropy)
        tally.mean("policy/loss", policy.loss)
        tally.mean("policy/clip_fraction", policy.clipped)
        tally.mean("policy/ratio_mean", policy.ratio)
        tally.maximum("policy/ratio_max", policy.ratio)
        drift = k3_divergence(batch.behaviour, logprobs, mask)
        tally.mean("policy/kl", drift)
        if first:
            difference = (logprobs - batch.behaviour).abs()
            tally.mean("mismatch/logprob_diff_mean", difference)
            tally.maximum("mismatch/logprob_diff_max", difference)
            tally.mean("mismatch/kl", drift)

    def _gather_gradients(self) -> None:
        for master, weight in self._pairs():
            if master is not weight and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def _apply(self, tally: Tally) -> None:
        """Step along the gathered gradient, and forget it. A gradient that is not finite is left out."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._config.max_grad_norm))
        if math.isfinite(norm):
            tally.mean("policy/grad_norm", torch.tensor([norm]))
            self._optimizer.step()
            with torch.no_grad():
                for master, weight in self._pairs():
                    if master is not weight:
                        weight.copy_(master)
            self.updates += 1
        else:
            logger.warning("The gradient of step %d is not finite (norm %s); the weights stay.", self.steps + 1, norm)
        self._optimizer.zero_grad(set_to_none=True)


def split(pairs: Sequence[tuple[Row, Floats]], tokens: int) -> list[list[tuple[Row, Floats]]]:
    """Consecutive rows in parts of at most ``tokens`` tokens; a longer row is a part of its own."""
    parts: list[list[tuple[Row, Floats]]] = []
    filled = 0
    for row, values in pairs:
        if not parts or filled + len(row) > tokens:
            parts.append([])
            filled = 0
        parts[-1].append((row, values))
        filled += len(row)
    return parts


def _give_up_if(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise UpdateStopped


def _require_no_images(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.images:
            raise ConfigError(
                f"Rollout {row.rollout_id} holds {row.images[0].image.label}, and the learner trains language models "
                "without eyes: it would train on placeholders of pixels that nobody saw. Train without images."
            )

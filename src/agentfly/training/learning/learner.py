"""Learner: updates the policy's weights from batches of rows with advantages."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError, UsageError
from agentfly.policies.embedded.scoring import hidden_states_before, score_states, score_tokens
from agentfly.training.advantages import Advantages, Floats
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.batches import (
    FlatBatch,
    ModelScores,
    flatten,
    micro_batches,
    mini_batches,
    raise_if_cancelled,
    split_by_row,
)
from agentfly.training.learning.critic import Critic
from agentfly.training.learning.kl_penalty import KLPenalty
from agentfly.training.learning.optimizer import Optimizer, learning_rate_factor
from agentfly.training.learning.trainable_model import (
    adapter_dropout,
    enable_gradient_checkpointing,
    gradient_checkpointing,
    reject_adapted_model,
    trainable_weights,
)
from agentfly.training.losses.aggregation import Aggregation, ClipRange, TokenBatch
from agentfly.training.losses.rollout_correction import mismatch_metrics
from agentfly.training.metrics import MetricAccumulator, accumulate_policy_metrics
from agentfly.training.rows import Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _StepInputs:
    """The inputs of one training step, with its accumulated metrics."""

    rows: Sequence[Row]
    tokens: FlatBatch
    rate: float
    stop: threading.Event | None
    tally: MetricAccumulator = field(default_factory=MetricAccumulator)
    own: Tensor = field(init=False)
    """Log-probs under the weights before the first update, NaN where not computed; float32 [N]."""
    reference: Tensor = field(init=False)
    """Log-probs under the policy before training, NaN where not computed yet; float32 [N]."""

    def __post_init__(self) -> None:
        for name in ("own", "reference"):
            object.__setattr__(self, name, torch.full_like(self.tokens.rollout_logprobs, math.nan))

    def mismatch(self) -> dict[str, float]:
        """Return mismatch metrics between the trainer's log-probs, where computed, and the rollout log-probs."""
        seen = self.tokens.mask & ~self.own.isnan()
        return mismatch_metrics(self.own, self.tokens.rollout_logprobs, seen, self.tokens.row)


class Learner:
    """Updates a model in place: all its weights, or new adapters that it injects.

    Create the learner before loading a checkpoint: it copies the model's current weights as the reference policy.

    Args:
        model: the model whose weights the policy samples from.
        config: the run's settings.
        temperature: sampling temperature of the tokens.
        needs_critic: whether the algorithm needs a critic.

    Attributes:
        steps: number of finished steps, including those before a resume.

    Raises:
        ConfigError: the model cannot be trained with these settings.
        PrerequisiteError: a package is missing.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainConfig, *, temperature: float, needs_critic: bool = False
    ) -> None:
        reject_adapted_model(model)
        self._model = model
        self._config = config
        self._temperature = temperature
        self._loss = config.chosen_loss
        self._clip = ClipRange(config.clip_low, config.clip_high, config.clip_dual)
        if config.gradient_checkpointing:  # before the rest, which copies the model
            enable_gradient_checkpointing(model)
        self._critic = Critic(model, config) if needs_critic else None
        weights = trainable_weights(model, config.lora, seed=config.seed)
        self._penalty = (
            KLPenalty(model, config.kl, temperature=temperature, adapters=config.lora is not None)
            if config.kl.coefficient > 0
            else None
        )
        self._optimizer = Optimizer(
            weights,
            betas=config.adam_betas,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        self.steps = 0

    @property
    def updates(self) -> int:
        """Number of updates of the policy's weights by this object."""
        return self._optimizer.updates

    def score(self, rows: Sequence[Row], stop: threading.Event | None = None) -> ModelScores:
        """Return the model outputs that the update of a batch needs. Blocks.

        Args:
            rows: the rows; rows of one group are consecutive.
            stop: if set, scoring is cancelled between two micro-batches.

        Raises:
            UpdateCancelled: ``stop`` was set.
            ConfigError: a row contains images, which the learner does not support.
        """
        _require_no_images(rows)
        penalty = self._penalty
        old = token_rewards = None
        if self._config.correction is not None:
            old = self._score_in_micro_batches(rows, stop, self._logprobs)
        if penalty is not None and penalty.in_reward:
            token_rewards = self._token_rewards(penalty, rows, old, stop)
        return ModelScores(
            old_logprobs=old,
            values=None if self._critic is None else self._critic.score(rows, stop),
            token_rewards=token_rewards,
        )

    def learn(
        self, rows: Sequence[Row], advantages: Advantages, scores: ModelScores, stop: threading.Event | None = None
    ) -> dict[str, float]:
        """Make one step of ``updates_per_step`` times ``mini_batches`` updates. Blocks; returns the step's metrics.

        A mini-batch without a learning signal is measured but makes no update. It has no rows, or only zero advantages
        while the loss has neither an entropy bonus nor a KL penalty.

        Args:
            rows: the rows; rows of one group are consecutive.
            advantages: the advantages of their sampled tokens.
            scores: the result of `score` for the rows.
            stop: if set, the step is cancelled between two micro-batches.

        Raises:
            UpdateCancelled: ``stop`` was set.
            ConfigError: a row contains images.
            UsageError: the loss does not return one value per token.
        """
        _require_no_images(rows)
        config, seed = self._config, f"{self._config.seed}/{self.steps}"
        tokens, mismatch = FlatBatch.from_rows(
            rows, advantages.values, scores, self._model.device
        ).with_rollout_correction(config.correction)
        step = _StepInputs(rows, tokens, self._rate(), stop)
        if self._penalty is not None and scores.token_rewards is not None:
            penalties = flatten(scores.token_rewards, torch.device("cpu"))
            step.tally.add_mean("policy/reference_kl", -penalties / self._penalty.coefficient.value)
        updates, skipped = self._optimizer.updates, self._optimizer.skipped
        with self._training_mode():
            for epoch in range(config.updates_per_step):
                for part in mini_batches(rows, config.mini_batches, f"{seed}/{epoch}"):
                    self._update(step, part, measure=epoch == 0, fresh=self._optimizer.updates == updates)
        if len(tokens.advantages):
            step.tally.add_mean("advantages/zero_fraction", tokens.advantages == 0)
        made = {
            "policy/grad_norm": 0.0,
            **(mismatch or step.mismatch()),
            **step.tally.metrics(),
            "policy/learning_rate": step.rate,
            "policy/updates": float(self._optimizer.updates - updates),
            "policy/updates_skipped": float(self._optimizer.skipped - skipped),
        }
        if self._penalty is not None:
            made["policy/kl_coefficient"] = self._penalty.coefficient.value
            if self._optimizer.updates > updates:
                self._penalty.coefficient = self._penalty.coefficient.updated(made["policy/reference_kl"], len(rows))
        if self._critic is not None:
            assert scores.values is not None
            assert advantages.returns is not None
            made |= self._critic.learn(rows, scores.values, advantages.returns, seed, stop)
        self.steps += 1
        return made

    def state(self) -> dict[str, Any]:
        """Return the state that an exact resume needs besides the model's weights."""
        return {
            "steps": self.steps,
            "kl_coefficient": None if self._penalty is None else self._penalty.coefficient.value,
            "optimizer": self._optimizer.state(),
            "critic": None if self._critic is None else self._critic.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. The model's weights must have been loaded before."""
        self.steps = state["steps"]
        if self._penalty is not None:
            self._penalty.coefficient = replace(self._penalty.coefficient, value=state["kl_coefficient"])
        self._optimizer.load_state(state["optimizer"])
        if self._critic is not None:
            self._critic.load_state(state["critic"])

    # --- before the update --------------------------------------------------------------------------------------------

    def _score_in_micro_batches(
        self, rows: Sequence[Row], stop: threading.Event | None, score: Callable[[Sequence[Row]], Tensor]
    ) -> list[Floats]:
        """Apply ``score`` to micro-batches of the rows without gradients; one value per sampled token."""
        parts = [torch.zeros(0)]
        with torch.no_grad():
            for part in micro_batches(rows, range(len(rows)), self._config.micro_batch_tokens):
                raise_if_cancelled(stop)
                parts.append(score([rows[index] for index in part]).cpu())
        return split_by_row(torch.cat(parts), rows)

    def _logprobs(self, rows: Sequence[Row]) -> Tensor:
        ids, targets = [row.ids for row in rows], [row.targets for row in rows]
        return score_tokens(self._model, ids, targets, temperature=self._temperature).logprobs

    def _token_rewards(
        self,
        penalty: KLPenalty,
        rows: Sequence[Row],
        old: Sequence[Floats] | None,
        stop: threading.Event | None,
    ) -> list[Floats]:
        """Return minus the KL penalty of each token.

        Both policies score the same micro-batches, so equal weights give equal roundings and a penalty of exactly 0.
        The rollout log-probs would add the sampler's rounding differences.
        """
        if penalty.needs_logprobs:
            here = torch.device("cpu")
            own = flatten(self._score_in_micro_batches(rows, stop, self._logprobs) if old is None else old, here)
            reference = flatten(self._score_in_micro_batches(rows, stop, penalty.logprobs), here)
            divergences = split_by_row(penalty.estimate(rows, own, reference), rows)
        else:
            divergences = self._score_in_micro_batches(rows, stop, lambda part: penalty.estimate(part, None, None))
        return [-penalty.coefficient.value * each for each in divergences]

    # --- one update ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Accumulate gradients, with gradient checkpointing and adapter dropout as configured."""
        dropping = adapter_dropout(self._model, self._config.lora, seed=self._config.seed, step=self.steps)
        with self._optimizer.accumulating_gradients(), gradient_checkpointing(self._model), dropping:
            yield

    def _rate(self) -> float:
        """Return the learning rate of the current step."""
        config = self._config
        return config.learning_rate * learning_rate_factor(
            self.steps,
            steps=config.steps,
            warmup=config.warmup_steps,
            schedule=config.schedule,
            final_share=config.min_learning_rate_ratio,
        )

    def _update(self, step: _StepInputs, part: Sequence[int], *, measure: bool, fresh: bool) -> None:
        """Make one update from a mini-batch. Rows without a gradient are at most measured."""
        here = step.tokens.select_rows(part)
        aggregation = Aggregation(
            self._config.aggregation,
            tokens=int(here.mask.sum()),
            rows=len(set(here.row[here.mask].tolist())),
            row_tokens=self._config.aggregation_tokens or 1,
        )
        teaching = self._rows_with_gradient(step, part)
        silent = [index for index in part if index not in teaching] if measure else []
        for indices, learns in ((list(teaching), True), (silent, False)):
            for micro in micro_batches(step.rows, indices, self._config.micro_batch_tokens):
                raise_if_cancelled(step.stop)
                with torch.set_grad_enabled(learns):
                    loss = self._micro_batch_loss(step, micro, aggregation, fresh=fresh)
                if learns:
                    loss.backward()  # type: ignore[no-untyped-call]
        if not teaching:
            return
        norm = self._optimizer.step(step.rate)
        if math.isfinite(norm):
            step.tally.add_mean("policy/grad_norm", torch.tensor([norm]))
        else:
            logger.warning("The gradient of step %d is not finite (norm %s); the weights stay.", self.steps + 1, norm)

    def _rows_with_gradient(self, step: _StepInputs, part: Sequence[int]) -> dict[int, None]:
        """Return the rows with a gradient: all with counted tokens if the loss has an entropy bonus or a KL penalty."""
        if self.steps < self._config.critic.warmup_steps and self._critic is not None:
            return {}
        always = self._config.entropy_coefficient > 0 or self._penalty_in_loss is not None
        counts = (step.tokens.mask if always else (step.tokens.advantages != 0) & step.tokens.mask).tolist()
        starts = step.tokens.starts
        return {index: None for index in part if any(counts[starts[index] : starts[index + 1]])}

    @property
    def _penalty_in_loss(self) -> KLPenalty | None:
        return None if self._penalty is None or self._penalty.in_reward else self._penalty

    def _micro_batch_loss(
        self, step: _StepInputs, part: Sequence[int], aggregation: Aggregation, *, fresh: bool
    ) -> Tensor:
        """Return the contribution of some rows to the loss of a mini-batch."""
        tokens, tally, rows = step.tokens.select_rows(part), step.tally, [step.rows[index] for index in part]
        ids, targets = [row.ids for row in rows], [row.targets for row in rows]
        states = hidden_states_before(self._model, ids, targets)
        scores = score_states(self._model, states, ids, targets, temperature=self._temperature)
        if fresh:
            step.own[tokens.indices] = scores.logprobs.detach()
            tally.add_mean("policy/clip_fraction_first", self._clipped_before_update(scores.logprobs.detach(), tokens))
        old = self._old_logprobs(step, tokens)
        batch = TokenBatch(scores.logprobs, old, tokens.advantages, tokens.mask, tokens.row, tokens.weights)
        policy = self._loss(batch, self._clip)
        if policy.loss.shape != scores.logprobs.shape:  # torch might broadcast it silently
            raise UsageError(
                f"The loss {self._config.loss!r} returned the shape {tuple(policy.loss.shape)} for "
                f"{len(scores.logprobs)} tokens. It must return one value per token; their mean is taken later, over "
                "the whole batch."
            )
        loss = aggregation(policy.loss * tokens.weights, tokens.mask, tokens.row)
        if self._config.entropy_coefficient > 0:
            loss = loss - self._config.entropy_coefficient * aggregation(scores.entropy, tokens.mask, tokens.row)
        if (penalty := self._penalty_in_loss) is not None:
            reference = self._reference_logprobs(step, tokens.indices, rows) if penalty.needs_logprobs else None
            divergence = penalty.divergence(rows, states, scores.logprobs, reference, tokens.mask)
            loss = loss + penalty.coefficient.value * aggregation(divergence, tokens.mask, tokens.row)
            tally.add_mean("policy/reference_kl", divergence[tokens.mask])
        accumulate_policy_metrics(tally, batch, policy, scores.entropy, self._clip)
        return loss

    def _clipped_before_update(self, own: Tensor, tokens: FlatBatch) -> Tensor:
        """Return which counted tokens are clipped before any update; bool [M].

        With rollout correction, the ratio refers to the trainer's own log-probs, so nothing is clipped yet. In a 16-bit
        format this ends with the first update, because any changed weight changes the rounding of all log-probs. The
        distance from the rollout log-probs then shows how much is clipped by rounding.
        """
        corrected = self._config.correction is not None and self._model.dtype == torch.float32
        old = own if corrected else tokens.rollout_logprobs
        batch = TokenBatch(own, old, tokens.advantages, tokens.mask, tokens.row, tokens.weights)
        return self._loss(batch, self._clip).clipped[tokens.mask]

    def _old_logprobs(self, step: _StepInputs, tokens: FlatBatch) -> Tensor:
        """Return the log-probs in the denominator of the ratio; [N].

        With rollout correction these are the trainer's log-probs before the update. Before the first update, those of
        the current pass are used, so that the ratio is exactly 1 in any number format.
        """
        if self._config.correction is None:
            return tokens.old_logprobs
        own = step.own[tokens.indices]
        return own.where(~own.isnan(), tokens.old_logprobs)

    def _reference_logprobs(self, step: _StepInputs, indices: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return the log-probs of some rows' tokens under the reference, computed once per step; [N].

        Reference and policy score the same micro-batch, so equal weights give equal roundings and no gradient.
        """
        assert self._penalty is not None
        if bool(step.reference[indices].isnan().any()):
            step.reference[indices] = self._penalty.logprobs(rows)
        return step.reference[indices]


def _require_no_images(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.images:
            raise ConfigError(
                f"Rollout {row.rollout_id} contains {row.images[0].image.label}, but the learner trains text-only "
                "models and would train on placeholders. Train without images."
            )

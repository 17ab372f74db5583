"""SFTTrainer: the supervised warm start by maximum likelihood, with evaluations and checkpoints."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentfly.core.errors import ConfigError
from agentfly.core.events import (
    CheckpointSaved,
    EvaluationFinished,
    EventStream,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.core.run_directory import RunDirectory
from agentfly.policies.embedded.loading import dtype_of
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.rollouts.rollout_record import describe_differences
from agentfly.training.checkpoints import (
    Checkpoints,
    load_weights,
    read_state,
    restore_learner,
    write_model,
    write_state_files,
)
from agentfly.training.learning.batches import micro_batches
from agentfly.training.learning.optimizer import Optimizer, learning_rate_factor
from agentfly.training.learning.trainable_model import (
    adapter_dropout,
    enable_gradient_checkpointing,
    gradient_checkpointing,
    reject_adapted_model,
    trainable_weights,
)
from agentfly.training.resume import how_to_go_further, remove_after
from agentfly.training.rows import Row
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.dataset import SFTDataset

logger = logging.getLogger(__name__)

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class SFTLearner:
    """Updates a model in place: all its weights, or new adapters that it injects.

    The loss of an update is the mean negative log-prob of the rows' sampled tokens at temperature 1. Other tokens are
    context without loss.

    Args:
        model: the model.
        config: the settings.
        updates: total number of updates of the run, for the schedule.

    Attributes:
        updates_done: number of updates, including those before a resume.

    Raises:
        ConfigError: the model cannot be trained with these settings.
        PrerequisiteError: a package is missing.
    """

    def __init__(self, model: PreTrainedModel, config: SFTConfig, *, updates: int) -> None:
        reject_adapted_model(model)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model)
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
        self.updates_done = 0

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
            norm = self._optimizer.step(rate)
        self.updates_done += 1
        if not math.isfinite(norm):
            logger.warning(
                "The gradient of update %d is not finite (norm %s); the weights stay.", self.updates_done, norm
            )
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
        """The state that a checkpoint needs beside the model's weights, for an exact resume."""
        return {"done": self.updates_done, "optimizer": self._optimizer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. The model's weights must have been loaded before."""
        self.updates_done = state["done"]
        self._optimizer.load_state(state["optimizer"])

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        scores = score_tokens(self._model, [row.ids for row in rows], [row.targets for row in rows])
        return -scores.logprobs.float().sum()

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Accumulate gradients, with gradient checkpointing and adapter dropout as configured."""
        dropping = adapter_dropout(self._model, self._config.lora, seed=self._config.seed, step=self.updates_done)
        with self._optimizer.accumulating_gradients(), gradient_checkpointing(self._model), dropping:
            yield

    def _rate(self) -> float:
        """The learning rate of the update at hand."""
        config, warmup = self._config, round(self._config.warmup_ratio * self._updates)
        share = learning_rate_factor(self.updates_done, steps=self._updates, warmup=warmup, schedule=config.schedule)
        return config.learning_rate * share


_FREE_TO_CHANGE = frozenset({"micro_batch_tokens", "checkpoint_every_updates", "keep_checkpoints", "threads"})
"""Settings that may differ when a run is resumed: they do not change what is learned."""


@dataclass(frozen=True)
class SFTResult:
    """The result of a supervised warm start.

    Attributes:
        run_dir: where its files are.
        updates: number of updates made, in this and in earlier processes.
        losses: mean loss before each update that this process made, in nats a token, by the number of the update.
        held_out: mean loss on the held-out rows, in nats a token, by the number of updates made; empty without any.
        checkpoint: the model after the last update, a Hugging Face directory.
        examples: what was learned from.
    """

    run_dir: Path
    updates: int
    losses: dict[int, float]
    held_out: dict[int, float]
    checkpoint: Path
    examples: SFTDataset


@dataclass(frozen=True)
class About:
    """The description of a run in its checkpoints."""

    model: str
    examples: str
    config: dict[str, Any]


class SFTTrainer:
    """Learns the rows of `SFTDataset`, several times over, in an order that the seed fixes.

    Args:
        policy: holds the model, which is changed in place; nothing may be sampled meanwhile.
        model: the model's name, for a resume.
        examples: what is learned from.
        config: the settings.
        run: where checkpoints and metrics are kept.
        events: where events go: each update is a step, each look at the held-out rows an evaluation.
        resume: continue from the last checkpoint in ``run``; start from scratch if it has none.

    Raises:
        ConfigError: the directory holds another run, or the run cannot be resumed with these settings.
    """

    def __init__(
        self,
        policy: EmbeddedPolicy,
        model: str,
        examples: SFTDataset,
        config: SFTConfig,
        run: RunDirectory,
        *,
        events: EventStream,
        resume: bool = False,
    ) -> None:
        if not resume:
            run.require_unused()
        self._policy = policy
        self._examples = examples
        self._config = config
        self._run = run
        self._events = events
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.keep_checkpoints)
        self._per_epoch = math.ceil(len(examples.rows) / config.rows_per_update)
        self._updates = config.epochs * self._per_epoch
        self._about = About(model, examples.fingerprint, config.model_dump(mode="json"))

    def run(self) -> SFTResult:
        """Train. Blocks. A run that is stopped in any way can be resumed from its last checkpoint.

        Raises:
            ConfigError: the model, the rows or the settings differ from those at the start of the run.
        """
        started = time.perf_counter()
        learner = self._restored()
        self._events.emit(
            TrainingStarted(
                run_dir=str(self._run.path),
                steps=self._updates,
                start_step=learner.updates_done,
                model=self._about.model,
                dtype=dtype_of(self._policy.model),
                device=str(self._policy.device),
                further=how_to_go_further("sft.epochs", _depends_on_length(self._config), self._run),
            )
        )
        losses: dict[int, float] = {}
        held_out: dict[int, float] = {}
        if learner.updates_done == 0:
            self._evaluate(learner, held_out)
        for rows in self._batches(learner.updates_done):
            began = time.perf_counter()
            metrics = learner.learn(rows)
            losses[learner.updates_done] = metrics["sft/loss"]
            metrics["time/step_s"] = time.perf_counter() - began
            self._events.emit(StepFinished(step=learner.updates_done, metrics=metrics))
            epoch_over = learner.updates_done % self._per_epoch == 0
            if epoch_over:
                self._evaluate(learner, held_out)
            every = self._config.checkpoint_every_updates
            if epoch_over or (every is not None and learner.updates_done % every == 0):
                self._save(learner)
        self._events.emit(TrainingFinished(step=learner.updates_done, seconds=time.perf_counter() - started))
        checkpoint = self._checkpoints.current
        assert checkpoint is not None
        return SFTResult(self._run.path, learner.updates_done, losses, held_out, checkpoint, self._examples)

    def _batches(self, done: int) -> Iterator[Sequence[Row]]:
        """The rows of each update that is still to be made."""
        size = self._config.rows_per_update
        for update in range(done, self._updates):
            epoch, number = divmod(update, self._per_epoch)
            order = list(range(len(self._examples.rows)))
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            yield [self._examples.rows[index] for index in order[number * size : (number + 1) * size]]

    def _evaluate(self, learner: SFTLearner, held_out: dict[int, float]) -> None:
        """Score the held-out rows."""
        if self._examples.held_out:
            held_out[learner.updates_done] = loss = learner.loss(self._examples.held_out)
            self._events.emit(EvaluationFinished(step=learner.updates_done, metrics={"sft/held_out_loss": loss}))

    def _restored(self) -> SFTLearner:
        self._run.ensure()
        self._checkpoints.remove_partial()
        latest = self._checkpoints.latest_valid()
        if latest is not None:
            require_same(latest, self._about, self._config)
        learner = SFTLearner(self._policy.model, self._config, updates=self._updates)
        if latest is not None:
            load_weights(self._policy.model, latest)
            restore_learner(learner, latest)
        remove_after(self._run, None if latest is None else learner.updates_done)
        return learner

    def _save(self, learner: SFTLearner) -> None:
        def write(path: Path) -> None:
            write_model(path, self._policy.model, self._policy.tokenizer.hf)
            write_state_files(path, "sft.json", asdict(self._about), learner.state())

        path = self._checkpoints.save(learner.updates_done, write)
        self._events.emit(CheckpointSaved(step=learner.updates_done, path=str(path)))


def _depends_on_length(config: SFTConfig) -> str:
    """What depends on the number of updates, in words; empty if nothing does."""
    if config.schedule != "constant":
        return f"the schedule {config.schedule} has ended"
    return "warmup_ratio is a share of all its updates" if config.warmup_ratio else ""


def require_same(checkpoint: Path, now: About, config: SFTConfig) -> None:
    """Raise unless the run of a checkpoint has the same rows and settings.

    Raises:
        ConfigError: they differ, or the checkpoint is not from a supervised warm start.
    """
    file = checkpoint / "trainer" / "sft.json"
    if not file.is_file():
        raise ConfigError(
            f"{checkpoint} is no checkpoint of a supervised warm start. Go on with a run of agentfly train by agentfly "
            "train --resume."
        )
    saved = read_state(checkpoint, "sft.json", lambda value: About(**value))
    free = _FREE_TO_CHANGE if _depends_on_length(config) else _FREE_TO_CHANGE | {"epochs"}
    kept = [name for name in now.config if name not in free]
    others = [
        *describe_differences(
            {name: saved.config.get(name) for name in kept}, {name: now.config[name] for name in kept}
        ),
        *describe_differences({"the model": saved.model}, {"the model": now.model}),
    ]
    if saved.examples != now.examples and not others:
        others.append("the trajectories, or what is taken of them, are others")
    if others:
        raise ConfigError(
            f"The warm start cannot be resumed with other settings than it was started with: {'; '.join(others)}. "
            "Restore them, or start a new run."
        )

"""SupervisedTrainer: a supervised warm start from its first update to its last checkpoint."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentfly.errors import ConfigError
from agentfly.events import (
    CheckpointSaved,
    EvaluationFinished,
    EventStream,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.policies.embedded.loading import dtype_of
from agentfly.policies.embedded.policy import EmbeddedPolicy
from agentfly.rollouts.traits import differences
from agentfly.run_directory import RunDirectory
from agentfly.training.checkpoints import Checkpoints, load_weights, read_learner, read_state, write_model, write_state
from agentfly.training.resume import forget_after, how_to_go_further
from agentfly.training.rows import Row
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.examples import Examples
from agentfly.training.sft.learner import SupervisedLearner

_FREE_TO_CHANGE = frozenset({"micro_batch_tokens", "checkpoint_every_updates", "keep_checkpoints", "threads"})
"""Settings that may differ when a run is resumed: they do not change what is learned."""


@dataclass(frozen=True)
class SFTResult:
    """What a supervised warm start came to.

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
    examples: Examples


@dataclass(frozen=True)
class About:
    """What a checkpoint says about the run it is of."""

    model: str
    examples: str
    config: dict[str, Any]


class SupervisedTrainer:
    """Learns the rows of `Examples`, several times over, in an order that the seed fixes.

    Args:
        policy: holds the model, which is changed in place; nothing may be sampled meanwhile.
        model: the model's name, for who resumes.
        examples: what is learned from.
        config: the settings.
        run: where checkpoints and metrics are kept.
        events: where events go: each update is a step, each look at the held-out rows an evaluation.
        resume: go on from the last checkpoint in ``run``; begin there if it has none.

    Raises:
        ConfigError: the directory holds another run, or the run cannot be gone on with as it is asked.
    """

    def __init__(
        self,
        policy: EmbeddedPolicy,
        model: str,
        examples: Examples,
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
        """Learn. Blocks; a run that is stopped, in whatever way, can be gone on with from its last checkpoint.

        Raises:
            ConfigError: the model, the rows or the settings are not those that the run was begun with.
        """
        started = time.perf_counter()
        learner = self._restored()
        self._events.emit(
            TrainingStarted(
                run_dir=str(self._run.path),
                steps=self._updates,
                start_step=learner.done,
                model=self._about.model,
                dtype=dtype_of(self._policy.model),
                device=str(self._policy.device),
                further=how_to_go_further("sft.epochs", _depends_on_length(self._config), self._run),
            )
        )
        losses: dict[int, float] = {}
        held_out: dict[int, float] = {}
        if learner.done == 0:
            self._look(learner, held_out)
        for rows in self._batches(learner.done):
            began = time.perf_counter()
            metrics = learner.learn(rows)
            losses[learner.done] = metrics["sft/loss"]
            metrics["time/step_s"] = time.perf_counter() - began
            self._events.emit(StepFinished(step=learner.done, metrics=metrics))
            epoch_over = learner.done % self._per_epoch == 0
            if epoch_over:
                self._look(learner, held_out)
            every = self._config.checkpoint_every_updates
            if epoch_over or (every is not None and learner.done % every == 0):
                self._save(learner)
        self._events.emit(TrainingFinished(step=learner.done, seconds=time.perf_counter() - started))
        checkpoint = self._checkpoints.current
        assert checkpoint is not None
        return SFTResult(self._run.path, learner.done, losses, held_out, checkpoint, self._examples)

    def _batches(self, done: int) -> Iterator[Sequence[Row]]:
        """The rows of each update that is still to be made."""
        size = self._config.rows_per_update
        for update in range(done, self._updates):
            epoch, number = divmod(update, self._per_epoch)
            order = list(range(len(self._examples.rows)))
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            yield [self._examples.rows[index] for index in order[number * size : (number + 1) * size]]

    def _look(self, learner: SupervisedLearner, held_out: dict[int, float]) -> None:
        """Score the held-out rows."""
        if self._examples.held_out:
            held_out[learner.done] = loss = learner.loss(self._examples.held_out)
            self._events.emit(EvaluationFinished(step=learner.done, metrics={"sft/held_out_loss": loss}))

    def _restored(self) -> SupervisedLearner:
        self._run.ensure()
        self._checkpoints.remove_unfinished()
        latest = self._checkpoints.sound()
        if latest is not None:
            require_same(latest, self._about, self._config)
        learner = SupervisedLearner(self._policy.model, self._config, updates=self._updates)
        if latest is not None:
            load_weights(self._policy.model, latest)
            learner.load_state(read_learner(latest))
        forget_after(self._run, None if latest is None else learner.done)
        return learner

    def _save(self, learner: SupervisedLearner) -> None:
        def write(path: Path) -> None:
            write_model(path, self._policy.model, self._policy.tokenizer.hf)
            write_state(path, "sft.json", asdict(self._about), learner.state())

        path = self._checkpoints.save(learner.done, write)
        self._events.emit(CheckpointSaved(step=learner.done, path=str(path)))


def _depends_on_length(config: SFTConfig) -> str:
    """What depends on the number of updates, in words; empty if nothing does."""
    if config.schedule != "constant":
        return f"the schedule {config.schedule} has ended"
    return "warmup_share is a share of all its updates" if config.warmup_share else ""


def require_same(checkpoint: Path, now: About, config: SFTConfig) -> None:
    """Raise unless the run of a checkpoint learns the same rows by the same settings.

    Raises:
        ConfigError: it does not, or it is none of a supervised warm start.
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
        *differences({name: saved.config.get(name) for name in kept}, {name: now.config[name] for name in kept}),
        *differences({"the model": saved.model}, {"the model": now.model}),
    ]
    if saved.examples != now.examples and not others:
        others.append("the trajectories, or what is taken of them, are others")
    if others:
        raise ConfigError(
            f"The warm start cannot be gone on with otherwise than it was begun: {'; '.join(others)}. Put them back, "
            "or begin a new run."
        )

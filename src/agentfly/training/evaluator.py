"""Evaluator: evaluates the policy on held-out tasks, and keeps the history for early stopping.

A resumed run reuses the evaluations and rollouts that finished before it was interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfly.core.errors import ConfigError, suggest_name
from agentfly.core.events import EvaluationFinished, EventStream
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.policies.policy import SamplingParams
from agentfly.rollouts.metrics import summarize
from agentfly.rollouts.rollout_record import RolloutRecord, fingerprint
from agentfly.rollouts.runner import Runner
from agentfly.training.config.groups import EarlyStopConfig
from agentfly.training.config.train_config import TrainConfig

LABEL = "eval"
"""Prefix of evaluation rollout ids. Equal ids make rollouts with the same seed sample the same tokens."""


class Evaluator:
    """Evaluates the policy on the held-out tasks of a run.

    Args:
        run: the run's directory.
        tasks: the held-out tasks.
        config: the run's settings.
        events: receives `EvaluationFinished`.
    """

    def __init__(self, run: RunDirectory, tasks: Sequence[Task], config: TrainConfig, events: EventStream) -> None:
        self._run = run
        self._tasks = tasks
        self._config = config
        self._events = events

    async def evaluate(self, runner: Runner, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation after ``step`` steps.

        A recorded evaluation is returned without rollouts and without an event. After an interruption, only the
        unfinished rollouts run.
        """
        known = next((row.values for row in self._run.metrics("eval") if row.step == step), None)
        if known is not None:
            return known
        started = time.perf_counter()
        record, settings = self._record(runner, step)
        async with record.opened(settings, {"label": LABEL}):
            trajectories = await runner.collect(
                self._tasks,
                attempts=self._config.eval_attempts,
                sampling=self._sampling,
                label=LABEL,
                priority=1,
                record=record,
            )
        metrics = summarize(trajectories) | {"time/eval_s": time.perf_counter() - started}
        self._events.emit(EvaluationFinished(step=step, metrics=metrics))
        return metrics

    def _sampling(self, params: SamplingParams) -> SamplingParams:
        return replace(params, temperature=self._config.eval_temperature)

    def _record(self, runner: Runner, step: int) -> tuple[RolloutRecord, dict[str, Any]]:
        """Return the record of an evaluation and its settings; a record with other settings is replaced."""
        path = self._run.trajectories_file(step, "eval")
        settings = runner.settings_fingerprint(self._sampling) | {
            "the number of attempts": self._config.eval_attempts,
            "the held-out tasks": fingerprint([task.to_row() for task in self._tasks]),
        }
        settings_file = path.with_suffix(".settings.json")
        if path.exists() and settings_file.exists():
            record = RolloutRecord(path, resume=True)
            if record.settings == json.loads(json.dumps(settings)):
                return record, settings
        path.unlink(missing_ok=True)
        settings_file.unlink(missing_ok=True)
        return RolloutRecord(path), settings


@dataclass(frozen=True, slots=True)
class EvaluationHistory:
    """The best evaluation so far by ``eval_metric``; higher is better.

    Attributes:
        best: best value of the metric; None before the first evaluation.
        best_step: step of the best evaluation.
        evaluations_since_best: number of evaluations after the best one.
    """

    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0

    def with_evaluation(self, step: int, metrics: Mapping[str, float], metric: str) -> EvaluationHistory:
        """Return the history with one more evaluation.

        Raises:
            ConfigError: no evaluation so far, including this one, has the metric.
        """
        value = metrics.get(metric)
        if value is None:
            if self.best is None:
                near = suggest_name(metric, sorted(metrics))
                raise ConfigError(f"eval_metric={metric!r}: the evaluation has no such metric. {near}")
            return self  # for example reward/mean when no rollout was scored
        if self.best is None or value > self.best:
            return EvaluationHistory(value, step, 0)
        return EvaluationHistory(self.best, self.best_step, self.evaluations_since_best + 1)

    def stop_reason(self, rule: EarlyStopConfig | None, metric: str) -> str:
        """Return why the run should stop now, or an empty string if it should continue."""
        if rule is None or self.best is None:
            return ""
        if rule.target is not None and self.best >= rule.target:
            return f"{metric} reached {self.best:.4g} after step {self.best_step}, and the target is {rule.target:.4g}"
        if rule.patience is not None and self.evaluations_since_best >= rule.patience:
            return (
                f"{metric} has not risen above {self.best:.4g}, found after step {self.best_step}, in "
                f"{self.evaluations_since_best} evaluations"
            )
        return ""

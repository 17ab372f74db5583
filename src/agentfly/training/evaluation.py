"""Evaluator: tries held-out tasks, and does not do again what it did before a run was killed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentfly.events import EvaluationFinished, EventStream
from agentfly.policies.policy import SamplingParams
from agentfly.rollouts.record import RolloutRecord
from agentfly.rollouts.runner import Runner
from agentfly.rollouts.summary import summarize
from agentfly.rollouts.traits import fingerprint
from agentfly.run_directory import RunDirectory
from agentfly.task import Task
from agentfly.training.config.train_config import TrainConfig

LABEL = "eval"
"""What the ids of the rollouts begin with, in every evaluation: named alike, rollouts of one seed sample alike."""


class Evaluator:
    """Tries the held-out tasks of a run.

    Args:
        run: the run's directory.
        tasks: the held-out tasks; with none there is nothing to do.
        config: the run's settings.
        events: where events go.
    """

    def __init__(self, run: RunDirectory, tasks: Sequence[Task], config: TrainConfig, events: EventStream) -> None:
        self._run = run
        self._tasks = tasks
        self._config = config
        self._events = events

    async def evaluate(self, runner: Runner, step: int) -> dict[str, float]:
        """The metrics of the evaluation after that many steps.

        Where it is on record, nothing is rolled out and nobody is told again; where it was cut short, only what had
        not finished is rolled out.
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
        """The record of an evaluation, begun anew where it was of another one."""
        path = self._run.trajectories_file(step, "eval")
        settings = runner.traits(self._sampling) | {
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

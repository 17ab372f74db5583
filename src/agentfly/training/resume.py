"""Resuming: checks whether a run can be resumed, and removes the files of steps that will be repeated."""

from __future__ import annotations

import json
import math
from typing import Any

from agentfly.core.errors import ConfigError
from agentfly.core.files import read_json_lines, replace_text
from agentfly.core.run_directory import RunDirectory, TrajectoryKind
from agentfly.rollouts.rollout_record import describe_differences
from agentfly.training.checkpoints import TrainerState, trainer_state_from
from agentfly.training.evaluator import EvaluationHistory

FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "eval_every_steps",
        "eval_attempts",
        "eval_temperature",
        "eval_metric",
        "early_stop",
        "keep_best",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "max_concurrent_generations",
        "max_concurrent_rollouts",
        "max_concurrent_starts",
        "max_failure_rate",
        "threads",
        "trackers",
        "project",
    }
)
"""Settings that may differ when a run is resumed: they do not change what is learned from a batch."""


def how_to_go_further(setting: str, ends_by: str, run: RunDirectory) -> str:
    """Return a sentence on how to extend a finished run.

    Args:
        setting: the setting for the length of a run.
        ends_by: why the run cannot be extended; empty if it can.
        run: the run.
    """
    if not ends_by:
        return f"to extend it, set a larger {setting}"
    return (
        f"{ends_by}, so it cannot be extended. To train further, start a new run with "
        f"model=CHECKPOINT, one of those in {run.checkpoints}"
    )


def depends_on_steps(schedule: str) -> bool:
    """Return whether the learning rate of a schedule depends on the number of steps."""
    return schedule != "constant"


def require_same_run(saved: TrainerState, now: TrainerState) -> None:
    """Raise unless a run with the settings of ``now`` can resume from ``saved``.

    Raises:
        ConfigError: settings that affect learning differ; the message names each with both values.
    """
    free = FREE_TO_CHANGE - {"steps"} if depends_on_steps(now.config["schedule"]) else FREE_TO_CHANGE
    kept = [name for name in now.config if name not in free]
    others = [
        *describe_differences(
            {name: saved.config.get(name) for name in kept}, {name: now.config[name] for name in kept}
        ),
        *describe_differences(saved.agent, now.agent, "the agent's"),
        *describe_differences({"the model": saved.model}, {"the model": now.model}),
        *describe_differences({"the reward": saved.reward}, {"the reward": now.reward}),
        *describe_differences({"the curriculum": saved.curriculum}, {"the curriculum": now.curriculum}),
    ]
    if saved.tasks != now.tasks:
        others.append("the tasks, or their order in the data set, have changed")
    if others:
        raise ConfigError(
            f"The run cannot be resumed with other settings than it was started with: {'; '.join(others)}. "
            "Restore them, or start a new run in another directory; with model=RUN_DIR/checkpoints/step-… it continues "
            "from this run's weights."
        )


def can_resume(run: RunDirectory, started_with: dict[str, Any] | None, now: TrainerState) -> bool:
    """Return whether a run without a checkpoint has rollouts to reuse; otherwise it starts from scratch.

    Args:
        run: the run's directory.
        started_with: the `TrainerState` that the run was started with, as plain values; None if unknown.
        now: the state that it would be resumed with.

    Raises:
        ConfigError: it has rollouts, and was started with other settings that affect learning.
    """
    rollouts = any(run.trajectories.glob("*.jsonl")) or any(run.journal.glob("*.jsonl"))
    if started_with is None or not rollouts:
        return False
    try:
        state = trainer_state_from(started_with)
    except (KeyError, TypeError):
        return False  # written by another version
    require_same_run(state, now)
    return True


def resumed_evaluations(saved: TrainerState, now: TrainerState) -> EvaluationHistory:
    """Return the saved evaluation history, or an empty one if ``eval_metric`` has changed."""
    same = saved.config["eval_metric"] == now.config["eval_metric"]
    return saved.evaluations if same else EvaluationHistory()


def last_saved_step(run: RunDirectory, after: int) -> int:
    """Return the last step of the unbroken sequence after ``after`` whose rollouts are saved."""
    step = after
    while run.trajectories_file(step + 1).exists():
        step += 1
    return step


def remove_after(run: RunDirectory, step: int | None) -> None:
    """Remove metrics and trajectories of the steps after ``step``; None removes all, including step 0."""
    last = -1 if step is None else step
    kinds: tuple[TrajectoryKind, ...] = ("train", "eval", "greedy")
    for kind in kinds:
        for number, path in run.trajectory_files(kind):
            if number > last:
                path.unlink()
                path.with_suffix(".settings.json").unlink(missing_ok=True)
    if run.metrics_file.exists():
        _replace_lines(run, [line for line in read_json_lines(run.metrics_file) if _step_of(line) <= last])


def _step_of(line: dict[str, Any]) -> float:
    """Return the step of a line of metrics, infinity for a damaged line."""
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


def _replace_lines(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    replace_text(run.metrics_file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

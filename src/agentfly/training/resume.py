"""Resuming: whether a run directory can be gone on with, and the removal of what will be done again."""

from __future__ import annotations

import json
from typing import Any

from agentfly.errors import ConfigError
from agentfly.training.checkpoints import Place
from agentfly.viewing.run_directory import RunDirectory, read_json_lines

FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "micro_batch_tokens",
        "eval_every_steps",
        "eval_attempts",
        "eval_temperature",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "max_concurrent_rollouts",
        "max_failure_share",
        "threads",
    }
)
"""Settings that may differ when a run is resumed: they do not change what is learned from a batch."""


def require_same_run(saved: Place, now: Place) -> None:
    """Raise unless a run with the settings of ``now`` can go on from ``saved``.

    Raises:
        ConfigError: settings that shape the learning differ; the message names each with both values.
    """
    differences = [
        f"{name} was {saved.config.get(name)!r} and is now {value!r}"
        for name, value in now.config.items()
        if name not in FREE_TO_CHANGE and saved.config.get(name) != value
    ]
    if saved.model != now.model:
        differences.append(f"the model was {saved.model!r} and is now {now.model!r}")
    if saved.tasks != now.tasks:
        differences.append("the tasks, or their order in the data set, are others")
    if differences:
        raise ConfigError(
            f"The run cannot be resumed with other settings than it was begun with: {'; '.join(differences)}. "
            "Put them back, or begin a new run from the checkpoint's model."
        )


def require_empty(run: RunDirectory) -> None:
    """Raise if the directory holds a run already.

    Raises:
        ConfigError: it does.
    """
    if run.metrics_file.exists() or any(run.checkpoints.glob("step-*")):
        raise ConfigError(
            f"{run.path} already holds a run. Set resume=True to go on with it, or choose another directory."
        )


def forget_after(run: RunDirectory, step: int | None) -> None:
    """Remove metrics and trajectories of the steps after ``step``, which will be done again; None removes all."""
    last = -1 if step is None else step
    for kind in ("train", "eval"):
        for number, path in run.trajectory_files(kind):
            if number > last:
                path.unlink()
    if run.metrics_file.exists():
        _replace_lines(run, [line for line in read_json_lines(run.metrics_file) if line["step"] <= last])


def _replace_lines(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    kept = run.metrics_file.with_suffix(".kept")
    kept.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    kept.replace(run.metrics_file)

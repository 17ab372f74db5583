"""What ``agentfly eval`` and ``agentfly rollout`` begin from: a configuration file, or a run and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from agentfly.cli.config_file import OracleConfig, PolicyConfig, RunConfig, load_config
from agentfly.errors import ConfigError
from agentfly.run_directory import Command, RunDirectory, whole_number


def endpoint_asked(base_url: str | None) -> list[str]:
    """The override that ``--base-url`` is short for."""
    return [] if base_url is None else [f"policy.base_url={base_url}"]


def run_to_go_on_with(path: Path, command: Command) -> RunDirectory:
    """The run that a command is to go on with.

    Raises:
        ConfigError: there is no run, or another command has begun it.
    """
    run = RunDirectory(path)
    if not run.config_file.is_file():
        raise ConfigError(f"{path} holds no run to go on with: there is no {run.config_file}.")
    if (begun_by := run.begun_by) not in (None, command):
        new = f" To begin anew from it: agentfly {command} {path}." if command in ("eval", "rollout") else ""
        raise ConfigError(
            f"{path} is a run of agentfly {begun_by}, and agentfly {command} cannot go on with it. Go on with it by "
            f"agentfly {begun_by} --resume {path}.{new}"
        )
    return run


def tell_unused(words: Sequence[str], command: Literal["train", "sft"]) -> None:
    """Say of overrides that the command does not read them: each has a group of settings of its own."""
    other, own, length = "training", "sft", "sft.epochs"
    if command == "train":
        other, own, length = "sft", "training", "training.steps"
    for word in words:
        if word.startswith(f"{other}."):
            typer.echo(
                f"{word} changes nothing here: agentfly {command} reads the settings below {own}, such as {length}, "
                "which says how long it runs",
                err=True,
            )


def load_source(source: Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[RunConfig, int]:
    """The configuration that a command is to follow, and the training step that its model has reached.

    Args:
        source: a configuration file, or the directory of a run, whose configuration is taken with its last checkpoint.
        overrides: ``key=value`` words.
        checkpoint: of a run: the step to take, or ``none`` for the model before training.

    Raises:
        ConfigError: there is no such configuration, run or checkpoint, or it cannot be followed.
    """
    if not source.exists():
        raise ConfigError(f"There is no {source}. Name a configuration file, or the directory of a run.")
    if not source.is_dir():
        if checkpoint is not None:
            raise ConfigError(f"--checkpoint chooses among those of a run, and {source} is not a run's directory.")
        return load_config(source, overrides), 0
    run = RunDirectory(source)
    if not run.config_file.is_file():
        raise ConfigError(f"{source} is not the directory of a run: there is no {run.config_file}.")
    config = load_config(run.config_file, ["run_dir=null", *overrides])
    if checkpoint == "none" or (checkpoint is None and isinstance(config.policy, (PolicyConfig, OracleConfig))):
        return config, 0
    step, path = _checkpoint(run.path, checkpoint)
    return config.model_copy(update={"model": str(path.resolve())}), step


def _checkpoint(run: Path, wanted: str | None) -> tuple[int, Path]:
    from agentfly.training.checkpoints import Checkpoints, require_sound  # needs the packages for training

    checkpoints = Checkpoints(RunDirectory(run).checkpoints, keep=1)
    saved = dict(checkpoints.saved())
    if not saved:
        raise ConfigError(f"{run} has no checkpoint yet. With --checkpoint none the model before training is taken.")
    if wanted is None:
        sound = checkpoints.sound()
        step = next(step for step, path in saved.items() if path == sound)
    elif (number := whole_number(wanted)) in saved:
        step = number
    else:
        raise ConfigError(f"{run} has no checkpoint {wanted!r}. It has {', '.join(map(str, saved))}.")
    return step, saved[step] if wanted is None else require_sound(saved[step])

"""CommandRun: what a command starts from (a file, a run, a checkpoint), and the run directory that it writes to."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from agentfly.cli.config_file import EndpointConfig, OracleConfig, RunConfig, load_config, save_config
from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.run_directory import Command, RunDirectory, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentfly.core.events import EventStream


def base_url_override(base_url: str | None) -> list[str]:
    """Return the override that ``--base-url`` abbreviates."""
    return [] if base_url is None else [f"policy.base_url={base_url}"]


def find_resumable_run(path: Path, command: Command) -> RunDirectory:
    """Return the run that a command is to resume.

    Raises:
        ConfigError: there is no run, or another command started it.
    """
    run = RunDirectory(path)
    if not run.config_file.is_file():
        raise ConfigError(f"{path} has no run to resume: {run.config_file} does not exist.")
    if (begun_by := run.begun_by) not in (None, command):
        new = f" To start a new run from it: agentfly {command} {path}." if command in ("eval", "rollout") else ""
        raise ConfigError(
            f"{path} is a run of agentfly {begun_by}, and agentfly {command} cannot continue it. Use "
            f"agentfly {begun_by} --resume {path}.{new}"
        )
    return run


def warn_unused_overrides(words: Sequence[str], command: Literal["train", "sft"]) -> None:
    """Warn about overrides that the command does not read: training and warm start have separate settings."""
    other, own, length = "training", "sft", "sft.epochs"
    if command == "train":
        other, own, length = "sft", "training", "training.steps"
    for word in words:
        if word.startswith(f"{other}."):
            typer.echo(
                f"{word} has no effect here: agentfly {command} reads the settings below {own}, such as {length}, "
                "the length of the run",
                err=True,
            )


def load_source(source: Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[RunConfig, int]:
    """Return the configuration of a command, and the training step of its model.

    Args:
        source: a configuration file, or a run's directory: its configuration with its last checkpoint.
        overrides: ``key=value`` words.
        checkpoint: the step of a run's checkpoint, or ``none`` for the model before training.

    Raises:
        ConfigError: there is no such configuration, run or checkpoint, or it is invalid.
    """
    if not source.exists():
        raise ConfigError(f"There is no {source}. Name a configuration file, or the directory of a run.")
    if not source.is_dir():
        if checkpoint is not None:
            raise ConfigError(f"--checkpoint selects a checkpoint of a run, and {source} is not a run's directory.")
        return load_config(source, overrides), 0
    run = RunDirectory(source)
    if not run.config_file.is_file():
        raise ConfigError(
            f"{source} is not the directory of a run: {run.config_file} does not exist. "
            "Name the directory of a run, such as runs/mine, or a configuration file, such as config.yaml."
        )
    config = load_config(run.config_file, ["run_dir=null", *overrides])
    if checkpoint == "none" or (checkpoint is None and isinstance(config.policy, (EndpointConfig, OracleConfig))):
        return config, 0
    step, path = _checkpoint(run.path, checkpoint)
    return config.model_copy(update={"model": str(path.resolve())}), step


def _checkpoint(run: Path, requested: str | None) -> tuple[int, Path]:
    from agentfly.training.checkpoints import Checkpoints, require_valid  # needs the training packages

    checkpoints = Checkpoints(RunDirectory(run).checkpoints, keep=1)
    saved = dict(checkpoints.saved())
    if not saved:
        raise ConfigError(f"{run} has no checkpoint yet. With --checkpoint none the model before training is taken.")
    if requested is None:
        valid = checkpoints.latest_valid()
        step = next(step for step, path in saved.items() if path == valid)
    elif (number := whole_number(requested.removeprefix("step-").lstrip("0") or "0")) in saved:
        step = number
    else:
        raise ConfigError(f"{run} has no checkpoint {requested!r}. It has {', '.join(map(str, saved))}.")
    return step, saved[step] if requested is None else require_valid(saved[step])


@dataclass(frozen=True)
class CommandRun:
    """The configuration of a command, and the run that it resumes.

    Attributes:
        config: the configuration.
        step: the training step of the model.
        kind: the purpose of the rollouts.
        resumed: the run to resume; None for a new run.
    """

    config: RunConfig
    step: int
    kind: Literal["eval", "rollout"]
    resumed: RunDirectory | None

    @classmethod
    def parse(
        cls,
        kind: Literal["eval", "rollout"],
        source: Path | None,
        overrides: Sequence[str],
        checkpoint: str | None,
        resume: Path | None,
    ) -> CommandRun:
        """Read the arguments of a command.

        Args:
            kind: the purpose of the rollouts.
            source: a configuration or a run; with ``resume``, a further override or None.
            overrides: ``key=value`` words.
            checkpoint: the step of a run's checkpoint, or ``none`` for the model before training.
            resume: the run to resume.

        Raises:
            ConfigError: there is no such configuration or run, or it is invalid.
        """
        if resume is None:
            if source is None:
                raise ConfigError("Name a configuration or a run, or continue one with --resume RUN_DIR.")
            config, step = load_source(source, overrides, checkpoint)
            return cls(config, step, kind, None)
        run = find_resumable_run(resume, kind)
        if checkpoint is not None:
            raise ConfigError("--checkpoint belongs to a new run; --resume continues with the run's own model.")
        config = load_config(run.config_file, [*([] if source is None else [str(source)]), *overrides])
        steps = [step for step, _ in run.trajectory_files(kind)]
        return cls(config, max(steps, default=0), kind, run)

    @property
    def recorded_arguments(self) -> Mapping[str, Any]:
        """The ``tasks`` and ``attempts`` of the resumed run; empty for a new run."""
        from agentfly.rollouts.rollout_record import RolloutRecord

        if self.resumed is None:
            return {}
        return RolloutRecord(self.resumed.trajectories_file(self.step, self.kind), resume=True).info

    @contextmanager
    def open_directory(self, command: str) -> Iterator[RunDirectory]:
        """Keep the run's directory while the block runs; remove a new one if no rollout finished in it.

        Args:
            command: the command that resumes the run, for the message when it is stopped.
        """
        from agentfly.cli.train import new_run

        run = self.resumed or new_run(self.config)
        try:
            if self.resumed is None:
                save_config(self.config, run.config_file)
            yield run
            save_config(self.config, run.config_file)
        except BaseException as error:
            if not run.trajectories_file(self.step, self.kind).exists():
                if self.resumed is None:
                    run.config_file.unlink(missing_ok=True)
                    run.remove_unless_begun()
            elif not isinstance(error, UsageError):
                words = shlex.join(["agentfly", command, "--resume", str(run.path)])
                typer.echo(f"stopped; to continue: {words}", err=True)
            raise


@contextmanager
def save_config_on_start(
    config: RunConfig, resumed: RunDirectory | None, events: EventStream, *, command: str, sources: str = ""
) -> Iterator[None]:
    """Save the configuration when training starts, and print the resume command if the run is interrupted.

    Args:
        config: the configuration.
        resumed: the run to resume; None for a new run.
        events: the events of the run within the block.
        command: the command that resumes the run.
        sources: further arguments of that command.
    """
    from agentfly.core.events import Event, TrainingStarted

    run = resumed

    def save_configuration(event: Event) -> None:
        nonlocal run
        if isinstance(event, TrainingStarted):
            run = RunDirectory(event.run_dir)
            save_config(config, run.config_file)

    try:
        with events.subscribed(save_configuration, required=True):  # without it the run could not be resumed
            yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, and SIGTERM
        if run is not None:
            words = ["agentfly", command, "--resume", shlex.quote(str(run.path)), *([sources] if sources else [])]
            typer.echo(f"stopped; to continue: {' '.join(words)}", err=True)
        raise

"""KeptRun: the run in which ``agentfly eval`` and ``agentfly rollout`` keep what they do, new or gone on with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from agentfly.cli.config_file import RunConfig, load_config, save_config
from agentfly.cli.source import load_source, run_to_go_on_with
from agentfly.errors import ConfigError, UsageError
from agentfly.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KeptRun:
    """What a command is to do, and where it keeps it.

    Attributes:
        config: the configuration.
        step: the training step that the model has reached.
        kind: what is rolled out for.
        resumed: the run that is gone on with; None where a new one begins.
    """

    config: RunConfig
    step: int
    kind: Literal["eval", "rollout"]
    resumed: RunDirectory | None

    @classmethod
    def of(
        cls,
        kind: Literal["eval", "rollout"],
        source: Path | None,
        overrides: Sequence[str],
        checkpoint: str | None,
        resume: Path | None,
    ) -> KeptRun:
        """What the words of a command ask for.

        Args:
            kind: what is rolled out for.
            source: a configuration, or a run; with ``resume`` it is a further override, if it is given at all.
            overrides: ``key=value`` words.
            checkpoint: of a run: the step to take, or ``none`` for the model before training.
            resume: the run to go on with.

        Raises:
            ConfigError: there is no such configuration or run, or it cannot be followed.
        """
        if resume is None:
            if source is None:
                raise ConfigError("Name a configuration or a run, or say --resume RUN_DIR to go on with one.")
            config, step = load_source(source, overrides, checkpoint)
            return cls(config, step, kind, None)
        run = run_to_go_on_with(resume, kind)
        if checkpoint is not None:
            raise ConfigError("--checkpoint belongs to a new run; --resume goes on with the model that there is.")
        config = load_config(run.config_file, [*([] if source is None else [str(source)]), *overrides])
        steps = [step for step, _ in run.trajectory_files(kind)]
        return cls(config, max(steps, default=0), kind, run)

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known of the run that is gone on with: its ``tasks`` and ``attempts``; empty if there is none."""
        from agentfly.rollouts.record import RolloutRecord

        if self.resumed is None:
            return {}
        return RolloutRecord(self.resumed.trajectories_file(self.step, self.kind), resume=True).about

    @contextmanager
    def directory(self, command: str) -> Iterator[RunDirectory]:
        """Within the block the run's directory is there; a new one goes again if no rollout has finished in it.

        Args:
            command: the command that goes on with it, for whoever stops it.
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
                typer.echo(f"stopped; to go on: {words}", err=True)
            raise

"""RunDirectory: the files of a run. All later analysis of a run reads this directory."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Self, get_args

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.files import read_json_lines

logger = logging.getLogger(__name__)

_MOST_DIGITS = 18

TrajectoryKind = Literal["train", "eval", "rollout", "greedy"]
Command = Literal["train", "sft", "eval", "rollout"]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step.

    Attributes:
        kind: ``train`` for a training step, ``eval`` for an evaluation after that many training steps.
        step: number of the step; an evaluation before training has step 0.
        time: seconds since the epoch.
        values: the metrics by name. A number that was not finite is left out.
    """

    kind: TrajectoryKind
    step: int
    time: float
    values: dict[str, float]


class RunDirectory:
    """The files of one run, by name.

    Args:
        path: the directory. `create` and `ensure` create it; read access never does.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._made: list[Path] = []  # directories that were created for the run, the deepest first

    @classmethod
    def create(cls, base: Path | str = "runs", name: str | None = None) -> Self:
        """Make the directory of a new run under ``base``, named after the time if no name is given.

        Raises:
            ConfigError: it holds a run already.
            PrerequisiteError: the directory cannot be written.
        """
        if name is not None:
            run = cls(Path(base) / name)
            run.require_unused()
            return run.ensure()
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        number = 1
        while True:
            run = cls(Path(base) / (stamp if number == 1 else f"{stamp}_{number}"))
            try:
                return run.ensure(new=True)
            except FileExistsError:
                number += 1

    def ensure(self, *, new: bool = False) -> Self:
        """Create the directory if it is missing.

        Raises:
            FileExistsError: ``new`` was asked for and the directory exists.
            PrerequisiteError: the directory cannot be written.
        """
        try:
            missing = list(itertools.takewhile(lambda one: not one.exists(), (self.path, *self.path.parents)))
            self.path.mkdir(parents=True, exist_ok=not new)
            self._made += missing
            self.trajectories.mkdir(exist_ok=True)
        except FileExistsError:
            if new and self.path.is_dir():
                raise
            raise ConfigError(f"{self.path} cannot hold a run: a file of that name is in the way.") from None
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise PrerequisiteError(
                f"The run's directory {str(self.path)!r:.200} cannot be created: {getattr(error, 'strerror', error)}. "
                "Choose a directory that you may write (run_dir=...)."
            ) from error
        return self

    def remove_unless_begun(self) -> None:
        """Remove what a run has left here that was refused before it began, and the directory if it is empty then."""
        if self.holds_run:
            return
        if not any(self.journal.glob("*.jsonl")):
            self.events_file.unlink(missing_ok=True)
        for directory in (self.trajectories, self.journal, self.checkpoints, self.path, *self._made):
            with contextlib.suppress(OSError):
                directory.rmdir()

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here. Files of a run that was refused before it began do not count."""
        files = self.trajectories.glob("*.jsonl"), self.checkpoints.glob("step-*")
        return self.config_file.exists() or self.metrics_file.exists() or any(itertools.chain(*files))

    @property
    def begun_by(self) -> Command | None:
        """The command that began the run and can resume it; None if the files do not show it."""
        rows = [*self.metrics("train"), *self.metrics("eval")]
        if rows:
            return "sft" if rows[0].values.keys() & {"sft/loss", "sft/held_out_loss"} else "train"
        if self.journal.exists():  # stopped before its first step
            return "train"
        if self.events_file.exists():
            return None
        kinds: tuple[Literal["eval", "rollout"], ...] = ("eval", "rollout")
        return next((kind for kind in kinds if self.trajectory_files(kind)), None)

    def require_unused(self) -> None:
        """Raise if the directory holds a run.

        Raises:
            ConfigError: it does.
        """
        if self.holds_run:
            raise ConfigError(
                f"{self.path} already holds a run. Go on with it (agentfly {self.begun_by or 'train'} --resume "
                f"{shlex.quote(str(self.path))}; in Python resume=True), choose another directory, or remove this one."
            )

    @property
    def config_file(self) -> Path:
        """The resolved configuration, as YAML."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """The metrics of every step and evaluation, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """Every event of the run, as JSON lines."""
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        """The directory of the saved trajectories."""
        return self.path / "trajectories"

    def trajectories_file(self, step: int, kind: TrajectoryKind = "train") -> Path:
        """The trajectories of a training step, of the evaluation after that many steps, or of rollouts at that step."""
        return self.trajectories / f"{kind}-{step:06d}.jsonl"

    def trajectory_files(self, kind: TrajectoryKind = "train") -> list[tuple[int, Path]]:
        """The saved files of trajectories with their steps, in the order of the steps."""
        return numbered(self.trajectories.glob(f"{kind}-*.jsonl"), f"{kind}-")

    def saved_trajectories(self) -> list[Path]:
        """All files of trajectories that the run saved, ordered by kind and step."""
        kinds: tuple[TrajectoryKind, ...] = get_args(TrajectoryKind)
        return [path for kind in kinds for _, path in self.trajectory_files(kind)]

    @property
    def journal(self) -> Path:
        """The directory of the rollouts that have ended and are in no step's file yet."""
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints, one directory each."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The directory that ``tensorboard --logdir`` reads."""
        return self.path / "tensorboard"

    @property
    def trackers_file(self) -> Path:
        """The ids of the run in trackers."""
        return self.path / "trackers.json"

    def metrics(self, kind: TrajectoryKind = "train") -> list[StepMetrics]:
        """The metrics of every step, in the order of the steps.

        A step that was run again after a resume counts once, with its last metrics. A line that was cut by a crash, or
        that holds no metrics, is left out.
        """
        rows: dict[int, StepMetrics] = {}
        for line in read_json_lines(self.metrics_file):
            try:
                row = StepMetrics(line["kind"], int(line["step"]), float(line["time"]), dict(line["metrics"]))
            except (KeyError, TypeError, ValueError):
                logger.warning("%s: a line that holds no metrics is left out: %.60r", self.metrics_file, line)
                continue
            if row.kind == kind:
                rows[row.step] = row
        return [rows[step] for step in sorted(rows)]


def numbered(paths: Iterable[Path], prefix: str) -> list[tuple[int, Path]]:
    """The paths that are named ``prefix`` and a number, with their numbers, lowest first; others are left out."""
    numbers = [(whole_number(path.stem.removeprefix(prefix)), path) for path in paths]
    return sorted((number, path) for number, path in numbers if number is not None)


def whole_number(text: str) -> int | None:
    """Parse a text of digits. Return None if it is not a number, or too large for a count."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None

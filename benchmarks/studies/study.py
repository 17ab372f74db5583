"""Study: the definition of a comparison: its runs, curves and figures. `run_study` makes the runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory

_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Arm:
    """One of the compared training methods.

    Attributes:
        name: names its runs' directories; letters, digits, ``-`` and ``_``.
        title: its title in pictures and tables.
        words: overrides of the study's configuration, as for ``agentfly train``: ``"training.strategy=step"``.
        program: the module whose ``train`` command makes the run.
    """

    name: str
    title: str
    words: tuple[str, ...] = ()
    program: str = "agentfly"


@dataclass(frozen=True)
class Curve:
    """A metric drawn over the training steps, with one line per arm.

    Attributes:
        title: label of the axis.
        metric: name of the metric.
        kind: metrics of training steps or of evaluations.
        log: whether the axis is logarithmic.
    """

    title: str
    metric: str
    kind: Literal["train", "eval"] = "train"
    log: bool = False


@dataclass(frozen=True)
class Figure:
    """A number of every run: a column of the tables.

    Attributes:
        title: the column's heading.
        of: reads it from a finished run; returns None if the run has no such number. `benchmarks.studies.figures`
            makes such functions.
        form: format specification, as for `format`: ``".0%"``.
    """

    title: str
    of: Callable[[RunDirectory], float | None]
    form: str = ".2f"


@dataclass(frozen=True)
class Study:
    """Training runs that differ in one setting.

    Attributes:
        name: names its files; letters, digits, ``-`` and ``_``.
        question: the question of the study, in one line.
        config: the configuration of all arms: the path of a YAML file, or ``package:file.yaml`` for one
            in a package.
        arms: the compared methods. The first is the baseline.
        curves: the curves of the picture.
        figures: the columns of the tables.
        words: overrides for all arms.

    Raises:
        ConfigError: there are not two arms, or two have the same name, or a name cannot name a file.
    """

    name: str
    question: str
    config: str
    arms: tuple[Arm, ...]
    curves: tuple[Curve, ...]
    figures: tuple[Figure, ...]
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(
                f"Study({self.name!r}): a study compares at least two arms with different names, "
                f"and has {', '.join(names) or 'none'}."
            )
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} cannot name a study or an arm: only letters, digits, - and _ can.")

    @property
    def config_file(self) -> Path:
        """Path of the configuration.

        Raises:
            ConfigError: there is no such file.
        """
        package, colon, file = self.config.rpartition(":")
        path = Path(str(files(package).joinpath(file))) if colon else Path(file)
        if not path.is_file():
            raise ConfigError(f"Study({self.name!r}, config={self.config!r}): there is no file {path}.")
        return path

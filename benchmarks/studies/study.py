"""Study: which runs are compared, and what is looked at in them. Data, from which `run_study` does the rest."""

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
    """One way of training that is compared.

    Attributes:
        name: names its runs' directories; letters, digits, ``-`` and ``_``.
        title: what it is called in pictures and tables.
        words: what it overrides of the study's configuration, as words of ``agentfly train``:
            ``"training.strategy=step"``.
        program: the module whose ``train`` command makes the run.
    """

    name: str
    title: str
    words: tuple[str, ...] = ()
    program: str = "agentfly"


@dataclass(frozen=True)
class Curve:
    """A metric that is drawn over the training steps, a line an arm.

    Attributes:
        title: what the axis says.
        metric: name of the metric.
        kind: whether of training steps or of evaluations.
        log: whether the axis is logarithmic.
    """

    title: str
    metric: str
    kind: Literal["train", "eval"] = "train"
    log: bool = False


@dataclass(frozen=True)
class Figure:
    """A number that is told of every run, a column of the tables.

    Attributes:
        title: the column's heading.
        of: reads it in a finished run; None where the run has no such number. `benchmarks.studies.figures`
            makes such functions.
        form: how it is written, as by `format`: ``".0%"``.
    """

    title: str
    of: Callable[[RunDirectory], float | None]
    form: str = ".2f"


@dataclass(frozen=True)
class Study:
    """Training runs that differ in one thing.

    Attributes:
        name: names its files; letters, digits, ``-`` and ``_``.
        question: what it is to find out, in a line.
        config: the configuration that all arms begin from: the path of a YAML file, or ``package:file.yaml`` for one
            in a package.
        arms: what is compared, the first being what the others are compared with.
        curves: what is drawn.
        figures: what is told of every run.
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
                f"Study({self.name!r}): a study compares at least two arms with names of their own, "
                f"and has {', '.join(names) or 'none'}."
            )
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} cannot name a study or an arm: only letters, digits, - and _ can.")

    @property
    def config_file(self) -> Path:
        """The path of the configuration.

        Raises:
            ConfigError: there is no such file.
        """
        package, colon, file = self.config.rpartition(":")
        path = Path(str(files(package).joinpath(file))) if colon else Path(file)
        if not path.is_file():
            raise ConfigError(f"Study({self.name!r}, config={self.config!r}): there is no file {path}.")
        return path

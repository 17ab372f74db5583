"""Findings: what the finished runs of a study came to, as values, and as text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from agentfly.evaluation.statistics import student_t_quantile
from benchmarks.studies.run_study import StudyRun
from benchmarks.studies.study import Figure, Study

UNKNOWN = "-"


@dataclass(frozen=True)
class SeedSpread:
    """Values of some runs.

    Attributes:
        mean, low, high: their mean, the least and the greatest.
        margin: half the width of the 95 % interval of the mean by Student's t, as if the runs were drawn from a normal
            distribution; None for fewer than two.
        count: how many they are.
    """

    mean: float
    low: float
    high: float
    margin: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedSpread:
        """The spread of at least one value."""
        return cls(fmean(values), min(values), max(values), _margin(values), len(values))


def _margin(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return student_t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class StudyResults:
    """What a study found.

    Attributes:
        study: the study.
        runs: its finished runs.
        numbers: for each run and figure, by its title, the number; None where the run has none.
    """

    study: Study
    runs: Sequence[StudyRun]
    numbers: Sequence[dict[str, float | None]]

    @classmethod
    def of(cls, study: Study, runs: Sequence[StudyRun]) -> StudyResults:
        """Read the figures of runs."""
        return cls(study, runs, [{figure.title: figure.of(run.directory) for figure in study.figures} for run in runs])

    def of_arm(self, arm: str, figure: Figure) -> list[float]:
        """The numbers that the runs of an arm have, in the order of seeds."""
        numbers = zip(self.runs, self.numbers, strict=True)
        found = [number[figure.title] for run, number in numbers if run.arm.name == arm]
        return [number for number in found if number is not None]

    def as_json(self) -> dict[str, Any]:
        """The numbers of every run, and their spread by arm."""
        return {
            "study": self.study.name,
            "question": self.study.question,
            "runs": [
                {"arm": run.arm.name, "seed": run.seed, **numbers}
                for run, numbers in zip(self.runs, self.numbers, strict=True)
            ],
            "arms": {
                arm.name: {figure.title: _as_json(self.of_arm(arm.name, figure)) for figure in self.study.figures}
                for arm in self.study.arms
            },
        }

    def as_markdown(self) -> str:
        """The arms beside one another, then every run, as tables."""
        figures = self.study.figures
        arms = [[arm.title, *(self._told(arm.name, figure) for figure in figures)] for arm in self.study.arms]
        runs = [
            [run.arm.title, str(run.seed), *(_written(numbers[figure.title], figure) for figure in figures)]
            for run, numbers in zip(self.runs, self.numbers, strict=True)
        ]
        titles = [figure.title for figure in figures]
        return "\n\n".join([_table(["arm", *titles], arms), _table(["arm", "seed", *titles], runs)])

    def _told(self, arm: str, figure: Figure) -> str:
        """The mean with the range over seeds, and how many have a number where not all do."""
        numbers = self.of_arm(arm, figure)
        if not numbers:
            return UNKNOWN
        spread = SeedSpread.of(numbers)
        text = _written(spread.mean, figure)
        if spread.count > 1:
            text += f" ({_written(spread.low, figure)} to {_written(spread.high, figure)})"
        runs = sum(run.arm.name == arm for run in self.runs)
        return text if spread.count == runs else f"{text}, {spread.count} of {runs} runs"


def _as_json(numbers: Sequence[float]) -> dict[str, Any]:
    if not numbers:
        return {"count": 0}
    spread = SeedSpread.of(numbers)
    return {
        "mean": spread.mean,
        "low": spread.low,
        "high": spread.high,
        "margin_95": spread.margin,
        "count": spread.count,
    }


def _written(number: float | None, figure: Figure) -> str:
    return UNKNOWN if number is None else format(number, figure.form)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The results of the finished runs of a study, as values and as Markdown tables."""

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
    """The spread of a number over runs.

    Attributes:
        mean, low, high: mean, smallest and largest value.
        margin: half the width of the 95 % interval of the mean by Student's t, which assumes a normal distribution;
            None for fewer than two values.
        count: number of values.
    """

    mean: float
    low: float
    high: float
    margin: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedSpread:
        """Return the spread of one or more values."""
        return cls(fmean(values), min(values), max(values), _margin(values), len(values))


def _margin(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return student_t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class StudyResults:
    """The results of a study.

    Attributes:
        study: the study.
        runs: its finished runs.
        numbers: for each run, its numbers by the titles of the figures; None if the run has no such number.
    """

    study: Study
    runs: Sequence[StudyRun]
    numbers: Sequence[dict[str, float | None]]

    @classmethod
    def of(cls, study: Study, runs: Sequence[StudyRun]) -> StudyResults:
        """Read the figures of the runs."""
        return cls(study, runs, [{figure.title: figure.of(run.directory) for figure in study.figures} for run in runs])

    def of_arm(self, arm: str, figure: Figure) -> list[float]:
        """Return the known numbers of an arm's runs, in the order of seeds."""
        numbers = zip(self.runs, self.numbers, strict=True)
        found = [number[figure.title] for run, number in numbers if run.arm.name == arm]
        return [number for number in found if number is not None]

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of every run, and their spread by arm."""
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
        """Return a table of the arms and a table of all runs."""
        figures = self.study.figures
        arms = [[arm.title, *(self._spread_text(arm.name, figure) for figure in figures)] for arm in self.study.arms]
        runs = [
            [run.arm.title, str(run.seed), *(_written(numbers[figure.title], figure) for figure in figures)]
            for run, numbers in zip(self.runs, self.numbers, strict=True)
        ]
        titles = [figure.title for figure in figures]
        return "\n\n".join([_table(["arm", *titles], arms), _table(["arm", "seed", *titles], runs)])

    def _spread_text(self, arm: str, figure: Figure) -> str:
        """Return the mean with the range over seeds, and the number of runs with a value if some have none."""
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

"""Functions that read a number from a finished run, for `benchmarks.studies.study.Figure`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from agentfly.core.run_directory import RunDirectory, TrajectoryKind

Reader = Callable[[RunDirectory], float | None]


def first(metric: str, kind: TrajectoryKind = "train") -> Reader:
    """Return a reader of the first value. For evaluations, this is the value before training."""
    return lambda run: next(iter(values(run, metric, kind).values()), None)


def last(metric: str, kind: TrajectoryKind = "train") -> Reader:
    """Return a reader of the last value."""
    return lambda run: next(reversed(values(run, metric, kind).values()), None)


def mean(metric: str, kind: TrajectoryKind = "train") -> Reader:
    """Return a reader of the mean over all steps."""
    return lambda run: fmean(values(run, metric, kind).values()) if values(run, metric, kind) else None


def largest(metric: str, kind: TrajectoryKind = "train") -> Reader:
    """Return a reader of the largest value."""
    return lambda run: max(values(run, metric, kind).values(), default=None)


def total(metric: str, per: float = 1.0) -> Reader:
    """Return a reader of the sum over all training steps, in units of ``per``."""
    return lambda run: sum(values(run, metric).values()) / per


def steps_to(metric: str, level: float, kind: TrajectoryKind = "eval") -> Reader:
    """Return a reader of the first step after which the metric is at least ``level``; None if it never is."""
    return lambda run: next((float(step) for step, value in values(run, metric, kind).items() if value >= level), None)


def values(run: RunDirectory, metric: str, kind: TrajectoryKind = "train") -> dict[int, float]:
    """Return the known values of a metric by step."""
    return {row.step: row.values[metric] for row in run.metrics(kind) if metric in row.values}

"""The curves of a study as a picture: for each arm the mean, the range over seeds, and a thin line per run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from agentfly.core.errors import PrerequisiteError
from benchmarks.studies.figures import values
from benchmarks.studies.run_study import StudyRun
from benchmarks.studies.study import Curve, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.6, 3.2
"""Size of one curve, in inches."""


def require_matplotlib() -> None:
    """Raise if pictures cannot be drawn.

    Raises:
        PrerequisiteError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PrerequisiteError(
            "Drawing the curves of a study needs matplotlib, which is not installed. Install it with: "
            "pip install matplotlib"
        )


def draw(study: Study, runs: Sequence[StudyRun], file: Path) -> None:
    """Draw the study's curves side by side into ``file``; the same runs give the same file.

    Raises:
        PrerequisiteError: matplotlib is missing.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * len(study.curves), HEIGHT), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(study.curves), squeeze=False)[0], study.curves, strict=True):
        _draw_curve(axes, study, runs, curve)
    with matplotlib.rc_context({"svg.hashsalt": study.name, "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_curve(axes: Axes, study: Study, runs: Sequence[StudyRun], curve: Curve) -> None:
    for number, arm in enumerate(study.arms):
        lines = [values(run.directory, curve.metric, curve.kind) for run in runs if run.arm.name == arm.name]
        for line in lines:
            axes.plot(list(line), list(line.values()), color=f"C{number}", linewidth=0.6, alpha=0.5)
        steps = sorted(set.intersection(*map(set, lines))) if lines else []
        columns = [[line[step] for line in lines] for step in steps]
        axes.fill_between(steps, [*map(min, columns)], [*map(max, columns)], color=f"C{number}", alpha=0.15)
        axes.plot(steps, [fmean(column) for column in columns], color=f"C{number}", linewidth=2, label=arm.title)
    axes.set(xlabel="training step", ylabel=curve.title)
    if curve.log:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")

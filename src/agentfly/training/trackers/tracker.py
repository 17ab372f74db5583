"""Tracker: what keeps the metrics of runs, and shows them side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentfly.core.errors import PrerequisiteError
from agentfly.core.installation import install_command


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker gets to know it.

    Attributes:
        project: what the run is one of, as the setting ``project`` says.
        name: name of the run's directory.
        directory: where a tracker that keeps files may keep them: a place of its own in the run's directory.
        config: the run's settings and what it trains; values that JSON can show, some of them nested.
        id: what `Tracker.start` gave when this run began, if it is gone on with; empty if it begins.
    """

    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    id: str = ""


class Tracker(Protocol):
    """Keeps the metrics of a run. All methods are called on one thread that is the tracker's own, and may block.

    Whatever one raises is reported once, and the run goes on without what could not be told.

    A class of trackers is called without arguments, before the run begins, and raises a `PrerequisiteError` where it
    cannot work.
    """

    def start(self, run: TrackedRun) -> str:
        """Begin, or go on with the run that has the id; the id under which it is known from now on."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Keep the metrics of a step. Those of an evaluation come in a call of their own.

        Args:
            step: number of finished steps. The steps after a checkpoint come again where a run goes on from it.
            metrics: finite numbers, by names that begin with ``train/`` or ``eval/``.
            histograms: all values of what ``metrics`` has but figures of, by names of that kind; none is empty.
        """
        ...

    def finish(self) -> None:
        """The run has ended, in whatever way. Called only after `start` has returned."""
        ...


def require_packages(package: str, extra: str) -> None:
    """Check that a tracker's package is installed, without importing it.

    Raises:
        PrerequisiteError: it is not; the message says how to get it.
    """
    if importlib.util.find_spec(package) is None:
        raise PrerequisiteError(
            f"The tracker {package!r} needs the package {package}, which is not installed here. Get it with: "
            f"{install_command(extra)}. Or leave it out of the setting trackers; metrics.jsonl has every "
            "metric all the same."
        )

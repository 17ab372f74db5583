"""Tracker: the protocol of experiment trackers."""

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
    """The description of a run for trackers.

    Attributes:
        project: the setting ``project``.
        name: name of the run's directory.
        directory: directory for the tracker's own files, inside the run's directory.
        config: the run's settings, model and reward as JSON values, some of them nested.
        id: the result of `Tracker.start` at the start of a resumed run; empty for a new run.
    """

    project: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    id: str = ""


class Tracker(Protocol):
    """A backend that stores a run's metrics. All methods are called on the tracker's own thread and may block.

    An exception is logged once; the run continues, and the failed call is lost. The class is called without arguments
    before the run starts, and raises a `PrerequisiteError` if it cannot work.
    """

    def start(self, run: TrackedRun) -> str:
        """Start a run, or resume the run with the id ``run.id``; returns the id of the run."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Store the metrics of a step. Metrics of an evaluation come in a separate call.

        Args:
            step: number of finished steps. After a resume, the steps after the checkpoint are logged again.
            metrics: finite numbers, by names that begin with ``train/`` or ``eval/``.
            histograms: all values of distributions of which ``metrics`` has statistics; none is empty.
        """
        ...

    def finish(self) -> None:
        """End the run, whether or not it succeeded. Called only after `start` has returned."""
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

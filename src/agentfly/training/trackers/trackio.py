"""TrackioTracker: trackio, which keeps runs on this machine, or in a Space of Hugging Face."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.training.trackers.tracker import TrackedRun, require_package


class TrackioTracker:
    """Keeps metrics with trackio. Its variables count: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL."""

    def __init__(self) -> None:
        require_package("trackio", "trackio")
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`. It knows a run by its name."""
        import trackio

        name = run.id or run.name
        with contextlib.redirect_stdout(io.StringIO()):  # which is for results
            self._run = trackio.init(
                project=run.project,
                name=name,
                config=dict(run.config),
                resume="must" if run.id else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return str(self._run.name)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`. Histograms are left to their figures among the metrics."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """See `Tracker.finish`."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()

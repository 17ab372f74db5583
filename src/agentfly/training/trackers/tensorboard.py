"""TensorBoardTracker: files that ``tensorboard --logdir`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentfly.training.trackers.tracker import TrackedRun, require_package


class TensorBoardTracker:
    """Writes what TensorBoard shows. It groups its charts by the part of a name before the slash."""

    def __init__(self) -> None:
        require_package("tensorboard", "train")
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.directory))
        return run.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._writer.close()

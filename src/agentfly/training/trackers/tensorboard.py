"""TensorBoardTracker: files that ``tensorboard --logdir`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.training.trackers.tracker import TrackedRun, require_package


class TensorBoardTracker:
    """Writes what TensorBoard shows. It groups its charts by the part of a name before the slash."""

    def __init__(self) -> None:
        require_package("tensorboard", "train")
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory))
        return run.name

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`."""
        import numpy as np

        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writer.add_histogram(name, np.asarray(values), step)
        self._writer.flush()

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._writer.close()

"""Tracker: the protocol of experiment trackers, and the threads that send a run's metrics to them."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentfly.core.errors import PrerequisiteError, describe_error
from agentfly.core.events import EvaluationFinished, Event, EventStream, StepFinished
from agentfly.core.files import replace_text
from agentfly.core.installation import install_command
from agentfly.core.run_directory import RunDirectory
from agentfly.core.threads.pool import run_in_thread_to_completion

logger = logging.getLogger(__name__)


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
        PrerequisiteError: it is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise PrerequisiteError(
            f"The tracker {package!r} needs the package {package}, which is not installed. Install it with: "
            f"{install_command(extra)}. Or leave it out of the setting trackers; metrics.jsonl has every metric in any "
            "case."
        )


# --- delivery ---------------------------------------------------------------------------------------------------------

_LogCall = tuple[int, dict[str, float], dict[str, list[float]]]  # the arguments of `Tracker.log`

FLUSH_TIMEOUT_S = 30.0
"""Seconds that a run waits at its end for all trackers to store the remaining metrics."""


@asynccontextmanager
async def track_run(
    trackers: Mapping[str, Tracker], run: RunDirectory, events: EventStream, *, project: str, config: Mapping[str, Any]
) -> AsyncIterator[None]:
    """Send the metrics of each step and evaluation to trackers while the block runs.

    Args:
        trackers: the trackers by name.
        run: the run's directory. It stores the trackers' run ids, so that a resumed run continues the same runs.
        events: provides the metrics.
        project: the setting ``project``.
        config: the run's settings, model and reward.
    """
    ids = _TrackerRunIds(run)
    deliveries = []
    for name, tracker in trackers.items():
        directory = run.tensorboard if name == "tensorboard" else run.path / name
        tracked = TrackedRun(project, run.path.resolve().name, directory, config, ids.of(name))
        deliveries.append(TrackerWorker(name, tracker, tracked, ids))
    try:
        with ExitStack() as stack:
            for delivery in deliveries:
                stack.enter_context(events.subscribed(delivery))
            yield
    finally:
        for delivery in deliveries:
            delivery.close()
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        for delivery in deliveries:
            await run_in_thread_to_completion(partial(delivery.wait, deadline))


class TrackerWorker:
    """Sends metrics to one tracker from its own thread, so that emitting an event never blocks."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, ids: _TrackerRunIds) -> None:
        self._name = name
        self._tracker = tracker
        self._run = run
        self._ids = ids
        self._queue: queue.SimpleQueue[_LogCall | None] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._deliver, name=f"agentfly-tracker-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, (StepFinished, EvaluationFinished)):
            kind = "train" if isinstance(event, StepFinished) else "eval"
            metrics = {f"{kind}/{name}": float(v) for name, v in event.metrics.items() if math.isfinite(v)}
            all_values = event.histograms if isinstance(event, StepFinished) else {}
            histograms = {f"{kind}/{name}": values for name, values in all_values.items() if values}
            self._queue.put((event.step, metrics, histograms))

    def close(self) -> None:
        """Announce that no more metrics will come."""
        self._queue.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until the tracker has stored everything, at most until ``deadline`` on the monotonic clock."""
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "The tracker %s did not store the last metrics within %g s. The run does not wait any longer; "
                "metrics.jsonl has all metrics.",
                self._name,
                FLUSH_TIMEOUT_S,
            )

    def _deliver(self) -> None:
        try:
            self._ids.keep(self._name, self._tracker.start(self._run))
        except Exception as error:
            self._report("could not start, and receives nothing", error)
            return
        while (item := self._queue.get()) is not None:
            try:
                self._tracker.log(*item)
            except Exception as error:
                self._report("has missed metrics", error)
        try:
            self._tracker.finish()
        except Exception as error:
            self._report("has not ended in good order", error)

    def _report(self, what: str, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "The tracker %s %s: %s. The run continues, and metrics.jsonl has all metrics. Further failures of this "
                "tracker are not reported.",
                self._name,
                what,
                describe_error(error),
            )


class _TrackerRunIds:
    """The trackers' ids of a run, stored in its directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.trackers_file
        self._lock = threading.Lock()
        self._ids: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def of(self, tracker: str) -> str:
        return self._ids.get(tracker, "")

    def keep(self, tracker: str, known_as: str) -> None:
        with self._lock:
            if self._ids.get(tracker) == known_as:
                return
            self._ids[tracker] = known_as
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(self._ids, indent=1))

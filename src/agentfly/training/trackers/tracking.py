"""track_run: sends a run's metrics to its trackers from background threads, so that trackers never block the run."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

from agentfly.core.errors import describe_error
from agentfly.core.events import EvaluationFinished, Event, EventStream, StepFinished
from agentfly.core.files import replace_text
from agentfly.core.run_directory import RunDirectory
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.training.trackers.tracker import TrackedRun, Tracker

logger = logging.getLogger(__name__)

_LogCall = tuple[int, dict[str, float], dict[str, list[float]]]  # what `Tracker.log` is called with

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
                "The tracker %s has not taken the last metrics within %g s, and is not waited for any longer. "
                "metrics.jsonl has all of them.",
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

"""A run's metrics and events as JSON lines, written by subscribers of its events."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from types import TracebackType
from typing import Self

from agentfly.core.errors import PrerequisiteError, describe_error
from agentfly.core.events import EvaluationFinished, Event, EventStream, StepFinished, Subscriber
from agentfly.core.files import append_json_line, mend_last_line
from agentfly.core.json_values import to_json_line
from agentfly.core.run_directory import RunDirectory, TrajectoryKind

logger = logging.getLogger(__name__)

_BUFFERED_BYTES = 2**16
_WAITING_BYTES = 2**24  # while the disk is full


@contextmanager
def record_events(run: RunDirectory, events: EventStream) -> Iterator[None]:
    """Write the metrics and all events of a run to its directory while the block runs.

    Emitting an event waits for no file, except for the one line of metrics per step. A checkpoint must never survive
    without the metrics of its step, so the run stops if they cannot be written. Events that cannot be written wait in
    memory up to a bound, and a warning counts those that are lost. All others are written however the block ends. A
    killed process (SIGKILL, a power cut) loses the events since the last finished step or evaluation.
    """
    run.ensure()
    with ExitStack() as stack:
        queued = stack.enter_context(BackgroundSubscriber([stack.enter_context(EventWriter(run))]))
        stack.enter_context(events.subscribed(MetricsWriter(run), required=True))
        stack.enter_context(events.subscribed(queued))
        yield


class BackgroundSubscriber:
    """Passes events to slow subscribers, in order, on its own thread. Leaving the block waits for the last event."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self._subscribers = subscribers
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentfly-events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join()

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def _run(self) -> None:
        stream = EventStream()
        with ExitStack() as stack:
            for subscriber in self._subscribers:
                stack.enter_context(stream.subscribed(subscriber))
            while (event := self._queue.get()) is not None:
                stream.emit(event)


class MetricsWriter:
    """Writes the metrics of each step and evaluation to the run's ``metrics.jsonl``, one line each.

    Each line has ``kind`` (``train`` or ``eval``), ``step``, ``time`` in seconds since the epoch, and ``metrics``.

    Raises:
        PrerequisiteError: a line cannot be written.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.metrics_file

    def __call__(self, event: Event) -> None:
        if isinstance(event, (StepFinished, EvaluationFinished)):
            row = {"kind": _kind(event), "step": event.step, "time": event.time, "metrics": _finite(event.metrics)}
            try:
                append_json_line(self._path, row)
            except OSError as error:
                raise PrerequisiteError(
                    f"The metrics of step {event.step} cannot be written to {self._path}: {error.strerror}. Free some "
                    "space, and continue with --resume (in Python: resume=True)."
                ) from error


class EventWriter:
    """Writes every event to the run's ``events.jsonl``. The buffer is flushed after each step and at the end.

    Events that cannot be written, for instance to a full disk, wait for the next attempt. If too many wait, the oldest
    are dropped. Nothing is raised: a run does not fail because of this file.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.events_file
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._due = _BUFFERED_BYTES
        self._failing = False
        self._lost = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        if lost := self._lost + len(self._waiting):
            logger.warning("%d events of the run are lost: %s could not be written.", lost, self._path)

    def __call__(self, event: Event) -> None:
        value = event.to_json()
        if isinstance(event, (StepFinished, EvaluationFinished)):
            value["metrics"] = _finite(event.metrics)
            self._due = 0
        line = (to_json_line(value) + "\n").encode("utf-8")
        self._waiting.append(line)
        self._bytes += len(line)
        if self._bytes >= self._due:
            self._write()

    def _write(self) -> None:
        """Write all waiting events, or none."""
        try:
            mend_last_line(self._path)
            with self._path.open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    _write_all(file, b"".join(self._waiting))
                except OSError:
                    file.truncate(size)  # these bytes would be written a second time
                    raise
        except OSError as error:
            if not self._failing:
                logger.warning("Events of the run cannot be written for now: %s.", describe_error(error))
            self._failing = True
            while self._bytes > _WAITING_BYTES:
                self._bytes -= len(self._waiting.popleft())
                self._lost += 1
            self._due = self._bytes + _BUFFERED_BYTES
            return
        self._waiting.clear()
        self._bytes, self._due, self._failing = 0, _BUFFERED_BYTES, False


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _kind(event: StepFinished | EvaluationFinished) -> TrajectoryKind:
    return "train" if isinstance(event, StepFinished) else "eval"


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the finite metrics, which JSON and charts can show. Others mean that nothing was measured."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

"""Writers that keep a run's metrics and events as JSON lines. They are subscribers of events."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from agentfly.events import EvaluationFinished, Event, EventStream, StepFinished, Subscriber
from agentfly.json_values import json_line
from agentfly.run_directory import Kind, RunDirectory, append_json_line, end_last_line

logger = logging.getLogger(__name__)


@contextmanager
def recorded(run: RunDirectory, events: EventStream) -> Iterator[None]:
    """Keep the metrics and all events of a run in its directory while the block runs.

    Whoever emits an event waits for no file, except for the one line of metrics of a step: a checkpoint that is saved
    after a step must never survive without them. Nothing is lost however the block ends; a process that is killed
    outright (SIGKILL, a power cut) loses the events since the last finished step or evaluation.
    """
    run.ensure()
    with ExitStack() as stack:
        queued = stack.enter_context(QueuedEvents([stack.enter_context(EventWriter(run))]))
        for subscriber in (MetricsWriter(run), queued):
            stack.enter_context(events.subscribed(subscriber))
        yield


class QueuedEvents:
    """Hands events to slow subscribers in a thread of its own, in their order; leaving it waits for the last one."""

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
    """Writes the metrics of each step and evaluation to the run's ``metrics.jsonl``, a line at a time.

    Each line has ``kind`` (``train`` or ``eval``), ``step``, ``time`` in seconds since the epoch, and ``metrics``.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.metrics_file

    def __call__(self, event: Event) -> None:
        if isinstance(event, (StepFinished, EvaluationFinished)):
            row = {"kind": _kind(event), "step": event.step, "time": event.time, "metrics": _finite(event.metrics)}
            append_json_line(self._path, row)


class EventWriter:
    """Writes every event to the run's ``events.jsonl``, buffered, and in full after each step and at its end."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.events_file

    def __enter__(self) -> Self:
        end_last_line(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=2**16)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __call__(self, event: Event) -> None:
        value = event.to_json()
        if isinstance(event, (StepFinished, EvaluationFinished)):
            value["metrics"] = _finite(event.metrics)
        self._file.write(json_line(value) + "\n")
        if isinstance(event, (StepFinished, EvaluationFinished)):
            self._file.flush()


def _kind(event: StepFinished | EvaluationFinished) -> Kind:
    return "train" if isinstance(event, StepFinished) else "eval"


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that JSON and a chart can show: a number that is not finite says that nothing was measured."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

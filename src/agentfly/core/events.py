"""The typed events on which all observation is based.

An `EventStream` hands each event to its subscribers at once, in the thread that emits it. Progress display, metrics,
event files and timelines are subscribers; none of them is in the hot path. A subscriber that raises is logged and
dropped from the stream rather than failing the work it watches, unless that work must not go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. ``time`` is in seconds since the epoch."""

    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON-able mapping with its type's name under ``event``."""
        value: dict[str, Any] = {"event": type(self).__name__}
        for name in self.__dataclass_fields__:
            held = getattr(self, name)
            value[name] = {**held} if isinstance(held, dict) else held
        return value


Subscriber = Callable[[Event], None]


class EventStream:
    """Delivers emitted events to subscribers."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._required: tuple[Subscriber, ...] = ()

    def emit(self, event: Event) -> None:
        """Hand an event to every subscriber.

        Raises:
            Exception: what a required subscriber raised, once all others have the event.
        """
        failure: Exception | None = None
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception as error:
                if any(subscriber is one for one in self._required):
                    failure = failure or error
                    continue
                logger.exception("A subscriber of events failed and gets no more of them: %r", subscriber)
                self._drop(subscriber)
        if failure is not None:
            raise failure

    @contextmanager
    def subscribed(self, subscriber: Subscriber, *, required: bool = False) -> Iterator[None]:
        """Have ``subscriber`` called with every event while the block runs.

        Args:
            subscriber: called with each event, in the thread that emits it.
            required: whether the work depends on it: its exceptions reach the code that emits the event.
        """
        self._subscribers = (*self._subscribers, subscriber)
        if required:
            self._required = (*self._required, subscriber)
        try:
            yield
        finally:
            self._drop(subscriber)

    def _drop(self, subscriber: Subscriber) -> None:
        self._subscribers = tuple(kept for kept in self._subscribers if kept is not subscriber)
        self._required = tuple(kept for kept in self._required if kept is not subscriber)


# --- resources -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceEvent(Event):
    """Something that happened to an instance or a request. ``pool`` is the spec's short name."""

    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePreparing(ResourceEvent):
    """A prerequisite of instances, such as an image, is being fetched. `ResourcePrepared` reports the end."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePrepared(ResourceEvent):
    """The prerequisite is ready, or failed with ``error``. It took ``seconds``."""

    what: str
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStarting(ResourceEvent):
    """An instance begins to start; a `ResourceStarted` or `ResourceStartFailed` follows, unless it is stopped."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStarted(ResourceEvent):
    """An instance is there, after ``seconds``."""

    instance: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStartFailed(ResourceEvent):
    """An instance did not start, or its prerequisite could not be prepared. Its remains are removed."""

    instance: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStartBackoff(ResourceEvent):
    """Starts of a pool fail, most recently with ``error``. The next one is tried in ``seconds``; requests keep waiting.

    It is the ``rounds``-th pause since a start succeeded.
    """

    error: str
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceReset(ResourceEvent):
    """An instance was brought back to its first state, in ``seconds``."""

    instance: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFailed(ResourceEvent):
    """An instance died, failed a health check or could not be reset, and is replaced."""

    instance: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStuck(ResourceEvent):
    """An instance could not be removed. It still counts against its pool, and the removal is retried."""

    instance: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStopped(ResourceEvent):
    """An instance is gone; its removal took ``seconds``."""

    instance: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested(ResourceEvent):
    """An owner requests a lease.

    Exactly one `LeaseGranted` or `LeaseRefused` answers; a cancelled request counts as refused.
    """

    owner: str
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(ResourceEvent):
    """A request got its lease, perhaps one that its owner had already."""

    owner: str
    scope: str
    instance: str
    waited_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused(ResourceEvent):
    """A request came to nothing, for ``error``."""

    owner: str
    scope: str
    error: str
    waited_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(ResourceEvent):
    """A lease is over, however many requests had got it, or though its owner never came to take it.

    The instance was held for ``held_seconds``, and something that its owner called ran in it for ``busy_seconds``.
    """

    owner: str
    scope: str
    instance: str
    held_seconds: float
    busy_seconds: float


# --- rollouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEvent(Event):
    """Something that happened in a rollout."""

    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsScheduled(Event):
    """One call requested this many rollouts. Some may be on record from an earlier run and are not repeated."""

    total: int
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStarted(RolloutEvent):
    group_id: str
    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished(RolloutEvent):
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFinished(RolloutEvent):
    turn: int
    tool: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFinished(RolloutEvent):
    reward: float | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinished(RolloutEvent):
    group_id: str
    finish_reason: str
    reward: float | None
    turns: int
    sampled_tokens: int
    seconds: float
    error: str | None = None


# --- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStarted(Event):
    """A training run begins or resumes. ``model`` is trained with the number format ``dtype`` on ``device``.

    ``further`` is a sentence that says how to extend a run that has made all its steps.
    """

    run_dir: str
    steps: int
    start_step: int
    model: str
    dtype: str
    device: str
    further: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Event):
    """One training step: rollouts, update and their metrics by name; ``histograms`` are all values of some of them."""

    step: int
    metrics: dict[str, float]
    histograms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished(Event):
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSynced(Event):
    """Servers that sample for a trainer have its weights.

    Attributes:
        version: the version of the weights.
        logprob_gap: how far the servers' log-probs of a probe are from the trainer's, in nats a token.
        paused_s: seconds for which nothing was sampled.
    """

    version: int
    logprob_gap: float
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFinished(Event):
    """A run has ended; ``reason`` says why before its last step, and is empty where it was the last."""

    step: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Progress of a long action outside rollouts, for instance loading a model."""

    what: str
    done: float | None = None
    total: float | None = None

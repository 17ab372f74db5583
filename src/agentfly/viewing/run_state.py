"""RunState: what a run is doing now, computed from its events. Displays read it; it draws nothing."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from agentfly.core.events import (
    CheckpointSaved,
    EvaluationFinished,
    Event,
    GenerationFinished,
    LeaseGranted,
    LeaseRefused,
    LeaseRequested,
    Progress,
    RewardFinished,
    RolloutFinished,
    RolloutsScheduled,
    RolloutStarted,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.core.trajectory import FinishReason
from agentfly.viewing.diagnostics import TrainingDiagnostics

REWARD = "reward/mean"
SUCCESS = "success/mean"
TURNS = "turns/mean"
_WINDOW_S = 20.0


@dataclass
class RunState:
    """The state of a run, updated by its events.

    Attributes:
        steps: number of the last training step; 0 where the run does not train.
        step: the last finished step.
        rewards: mean reward of each finished step.
        evaluations: metrics of each evaluation, with its step.
        metrics: metrics of the last finished step.
        planned: number of rollouts requested in one call, recorded ones included; 0 if unknown.
        running, finished, failed, cancelled: number of rollouts. Failed ones count as finished, too.
        scores: rewards of the finished, valid rollouts that were scored.
        waiting: number of requests that wait for a resource.
        lessons: diagnostics of the finished steps.
        first_scoring_error: message of the first scoring failure in the last finished step; empty if there was none.
        model: the trained model, its number format and device.
        dtype: the number format; empty if the run does not train.
        further: how to extend the run once it has made all its steps, in words.
        stop_reason: why the run ended before its last step; empty if it did not.
        activity: what happens besides rollouts, for instance the loading of a model.
    """

    steps: int = 0
    step: int = 0
    rewards: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    planned: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    waiting: int = 0
    tokens: int = 0
    lessons: TrainingDiagnostics = field(default_factory=TrainingDiagnostics)
    first_scoring_error: str = ""
    stop_reason: str = ""
    scores: list[float] = field(default_factory=list)
    activity: Progress | None = None
    run_dir: str = ""
    model: str = ""
    dtype: str = ""
    further: str = ""
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _step_began: float = 0.0
    _planned_at: float = 0.0
    _recorded: int = 0
    _scoring_error: str = ""

    def update(self, event: Event) -> None:
        """Apply one event."""
        match event:
            case TrainingStarted():
                self.steps, self.step, self.run_dir = event.steps, event.start_step, event.run_dir
                self.dtype, self.further = event.dtype, event.further
                self.model = f"{event.model} in {event.dtype} on {event.device}"
                self._step_began = event.time
            case RolloutsScheduled():
                self.planned, self.finished, self.failed, self.scores = event.total, event.recorded, 0, []
                self.cancelled = 0
                self._planned_at, self._recorded = event.time, event.recorded
            case RolloutStarted():
                self.running += 1
                self.activity = None
            case RolloutFinished():
                self.running -= 1
                if event.finish_reason == FinishReason.CANCELLED:  # unfinished: a resumed run rolls it out again
                    self.cancelled += 1
                    return
                self.finished += 1
                self.failed += event.error is not None
                if self.planned and event.error is None and event.reward is not None:
                    self.scores.append(event.reward)
            case RewardFinished():
                self._scoring_error = self._scoring_error or event.error or ""
            case GenerationFinished():
                self.tokens += event.sampled_tokens
                self._tokens.append((event.time, event.sampled_tokens))
            case LeaseRequested():
                self.waiting += 1
            case LeaseGranted() | LeaseRefused():
                self.waiting -= 1
            case StepFinished():
                self.step, self.metrics = event.step, event.metrics
                self.lessons.add(event.metrics, self._scoring_error)
                self.first_scoring_error, self._scoring_error = self._scoring_error, ""
                self._step_seconds.append(event.time - self._step_began)
                self._step_began = event.time
                if REWARD in event.metrics:
                    self.rewards.append(event.metrics[REWARD])
            case EvaluationFinished():
                self.evaluations.append((event.step, event.metrics))
                self._scoring_error = ""
                self._step_began = event.time
            case CheckpointSaved():
                self._step_began = event.time
            case Progress():
                self.activity = event
            case TrainingFinished():
                self.activity, self.stop_reason = None, event.reason

    @property
    def was_already_finished(self) -> bool:
        """Whether the resumed run had already made all of its steps."""
        return 0 < self.steps <= self.step and not self._step_seconds

    def tokens_per_second(self, now: float | None = None) -> float:
        """Return sampled tokens per second over the last twenty seconds, training time included."""
        now = time.time() if now is None else now
        while self._tokens and self._tokens[0][0] < now - _WINDOW_S:
            self._tokens.popleft()
        if not self._tokens:
            return 0.0
        return sum(count for _, count in self._tokens) / max(1.0, now - self._tokens[0][0])

    def rollout_seconds_left(self, now: float | None = None) -> float | None:
        """Return seconds until all planned rollouts finish, at the pace so far; None before the first has finished."""
        done = self.finished - self._recorded
        if not self.planned or done < 1:
            return None
        elapsed = (time.time() if now is None else now) - self._planned_at
        return max(0, self.planned - self.finished) * elapsed / done

    def seconds_left(self) -> float | None:
        """Return seconds until the last step ends, at the pace of the last twenty; None before the first.

        Evaluations and checkpoints between the steps are not counted.
        """
        if not self._step_seconds:
            return None
        return max(0, self.steps - self.step) * sum(self._step_seconds) / len(self._step_seconds)

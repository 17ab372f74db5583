"""TrainingDiagnostics: whether the model could learn from the steps of a run, and what prevented it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentfly.viewing.formatting import pluralize

_TOOL_ERRORS = "tool_errors/"
_SCORING_ERRORS = "failures/reward/"
_MAX_ERROR_CHARS = 300
_MIN_CLIPPED_SHARE = 0.01
_EQUAL_SCORES = "all attempts at each task scored the same"


@dataclass
class TrainingDiagnostics:
    """Diagnoses from the metrics of training steps whether the model could learn.

    Attributes:
        steps: number of steps.
        steps_without_learning: number of steps that learned nothing, by reason.
        rollouts: number of rollouts.
        unscored: number of rollouts without a score.
        scoring_errors: number of scoring failures, by kind of failure.
        first_scoring_error: message of the first scoring failure, if known.
        clipped: the largest share of tokens that were clipped before any update. Only on-policy steps count.
        calls: number of tool calls.
        failed_calls: number of failed tool calls, by kind of failure.
    """

    steps: int = 0
    steps_without_learning: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0
    unscored: int = 0
    scoring_errors: Counter[str] = field(default_factory=Counter)
    first_scoring_error: str = ""
    clipped: float = 0.0
    calls: int = 0
    failed_calls: Counter[str] = field(default_factory=Counter)

    def add(self, metrics: dict[str, float], scoring_error: str = "") -> None:
        """Add the metrics of one step, and the message of its first scoring failure."""
        self.steps += 1
        if reason := _no_learning_reason(metrics):
            self.steps_without_learning[reason] += 1
        if metrics.get("policy/staleness_max", 0.0) == 0.0:
            self.clipped = max(self.clipped, metrics.get("policy/clip_fraction_first", 0.0))
        self.rollouts += round(metrics.get("rollouts", 0.0))
        self.unscored += round(metrics.get("unscored", 0.0))
        self.first_scoring_error = self.first_scoring_error or scoring_error
        valid = metrics.get("rollouts", 0.0) - metrics.get("failures/infrastructure", 0.0)
        self.calls += round(metrics.get("tool_calls/mean", 0.0) * valid)
        for name, count in metrics.items():
            if name.startswith(_SCORING_ERRORS):
                self.scoring_errors[name.removeprefix(_SCORING_ERRORS)] += round(count)
            if name.startswith(_TOOL_ERRORS) and name != f"{_TOOL_ERRORS}rate":
                self.failed_calls[name.removeprefix(_TOOL_ERRORS)] += round(count)

    def messages(self) -> list[str]:
        """Return the findings as sentences. Empty if every step had a learning signal and most tool calls succeeded."""
        found = [self._unscored()] if self.unscored else []
        for reason, count in self.steps_without_learning.items():
            where = "" if self.steps == 1 else f" in {count} of {self.steps} steps"
            found.append(f"nothing learned{where}: {self._equal_scores() if reason == _EQUAL_SCORES else reason}")
        if self.clipped >= _MIN_CLIPPED_SHARE:
            most = "" if self.steps == 1 else "up to "
            found.append(
                f"{most}{self.clipped:.0%} of the tokens are clipped before any update, because log-probs of training "
                "and sampling differ (mismatch/*): set dtype: float32, wider clip_low and clip_high, or correction "
                "where samplers are other programs"
            )
        failed = self.failed_calls.total()
        if failed and failed >= self.calls / 2:
            kinds = ", ".join(f"{kind} {count / failed:.0%}" for kind, count in self.failed_calls.most_common(2))
            found.append(f"{failed / max(self.calls, failed):.0%} of the tool calls failed ({kinds})")
        return found

    def _equal_scores(self) -> str:
        if self.unscored == self.rollouts > 0:
            return "no attempt has a score"
        which = "attempts at each task that have a score" if self.unscored else "attempts at each task"
        return f"all {which} scored the same"

    def _unscored(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.scoring_errors.most_common(2))
        because = f": {kinds}" if kinds else ""
        first = (
            f", for instance: {' '.join(self.first_scoring_error.split()):.{_MAX_ERROR_CHARS}}"
            if self.first_scoring_error
            else ""
        )
        return f"{self.unscored} of {pluralize(self.rollouts, 'rollout')} unscored{because}{first}"


def _no_learning_reason(metrics: dict[str, float]) -> str:
    """Return why a step learned nothing from rewards, or an empty string if it did."""
    shares = ("groups/zero_variance_fraction", "groups/singleton_fraction", "groups/empty_fraction")
    equal = sum(metrics.get(name, 0.0) for name in shares) > 1 - 1e-9
    if metrics.get("policy/updates", 1.0) > 0.0:
        # With a loss above 0, equal rewards had a learning signal: not all algorithms compare attempts at a task.
        return _EQUAL_SCORES if equal and metrics.get("policy/loss", 0.0) == 0.0 else ""
    if metrics.get("policy/updates_skipped", 0.0) > 0.0:
        return "the gradient was not finite"
    if metrics.get("mismatch/masked_fraction", 0.0) == 1.0:
        return "rollout correction left out every token"
    if metrics.get("advantages/zero_fraction", 1.0) < 1.0:
        return "only the critic was trained (critic.warmup_steps)"
    if equal:
        return _EQUAL_SCORES
    if metrics.get("rows", 1.0) == 0.0 and metrics.get("excluded/no_baseline", 0.0) > 0.0:
        return "no task has the score of a greedy rollout"
    return "every advantage was 0"

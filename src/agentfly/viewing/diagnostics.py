"""Lessons: whether the steps of a run could teach anything, and what stood in the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentfly.viewing.formatting import pluralize

_FAILURES = "tool_errors/"
_REFUSALS = "failures/reward/"
_SHOWN = 300
_MUCH_CLIPPED = 0.01
_ALIKE = "all attempts at each task scored the same"


@dataclass
class TrainingDiagnostics:
    """What the metrics of steps say about whether there was anything to learn from.

    Attributes:
        steps: number of steps.
        steps_without_learning: number of those that learned nothing, by the reason.
        rollouts: number of rollouts.
        unscored: number of those without a score.
        scoring_errors: number of times that scoring failed, by the kind of failure.
        first_scoring_error: why scoring failed for the first time, as far as it is known.
        clipped: the largest share of tokens that clipping left out before there was any update, of steps that
            trained what their own weights had sampled.
        calls: number of tool calls.
        failed_calls: number of tool calls that failed, by the kind of failure.
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

    def add(self, metrics: dict[str, float], refusal: str = "") -> None:
        """Take in the metrics of one step, and why scoring failed for the first time in it."""
        self.steps += 1
        if reason := _no_learning_reason(metrics):
            self.steps_without_learning[reason] += 1
        if metrics.get("policy/staleness_max", 0.0) == 0.0:
            self.clipped = max(self.clipped, metrics.get("policy/clip_fraction_first", 0.0))
        self.rollouts += round(metrics.get("rollouts", 0.0))
        self.unscored += round(metrics.get("unscored", 0.0))
        self.first_scoring_error = self.first_scoring_error or refusal
        sound = metrics.get("rollouts", 0.0) - metrics.get("failures/infrastructure", 0.0)
        self.calls += round(metrics.get("tool_calls/mean", 0.0) * sound)
        for name, count in metrics.items():
            if name.startswith(_REFUSALS):
                self.scoring_errors[name.removeprefix(_REFUSALS)] += round(count)
            if name.startswith(_FAILURES) and name != f"{_FAILURES}share":
                self.failed_calls[name.removeprefix(_FAILURES)] += round(count)

    def messages(self) -> list[str]:
        """What there is to say; nothing if every step taught something and most tool calls went well."""
        told = [self._unscored()] if self.unscored else []
        for reason, count in self.steps_without_learning.items():
            where = "" if self.steps == 1 else f" in {count} of {self.steps} steps"
            told.append(f"nothing learned{where}: {self._alike() if reason == _ALIKE else reason}")
        if self.clipped >= _MUCH_CLIPPED:
            most = "" if self.steps == 1 else "up to "
            told.append(
                f"{most}{self.clipped:.0%} of the tokens are clipped before any update, because log-probs of training "
                "and sampling differ (mismatch/*): set dtype: float32, wider clip_low and clip_high, or correction "
                "where samplers are other programs"
            )
        failed = self.failed_calls.total()
        if failed and failed >= self.calls / 2:
            kinds = ", ".join(f"{kind} {count / failed:.0%}" for kind, count in self.failed_calls.most_common(2))
            told.append(f"{failed / max(self.calls, failed):.0%} of the tool calls failed ({kinds})")
        return told

    def _alike(self) -> str:
        if self.unscored == self.rollouts > 0:
            return "no attempt has a score"
        which = "attempts at each task that have a score" if self.unscored else "attempts at each task"
        return f"all {which} scored the same"

    def _unscored(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.scoring_errors.most_common(2))
        because = f": {kinds}" if kinds else ""
        first = (
            f", for instance: {' '.join(self.first_scoring_error.split()):.{_SHOWN}}"
            if self.first_scoring_error
            else ""
        )
        return f"{self.unscored} of {pluralize(self.rollouts, 'rollout')} unscored{because}{first}"


def _no_learning_reason(metrics: dict[str, float]) -> str:
    """Why a step left the policy as it was, or moved it by what no reward asked for; empty if it learned."""
    shares = ("groups/zero_variance_share", "groups/singleton_share", "groups/empty_share")
    alike = sum(metrics.get(name, 0.0) for name in shares) > 1 - 1e-9
    if metrics.get("policy/updates", 1.0) > 0.0:
        # A loss says that equal rewards were learned from: not all algorithms compare the attempts at a task.
        return _ALIKE if alike and metrics.get("policy/loss", 0.0) == 0.0 else ""
    if metrics.get("policy/updates_skipped", 0.0) > 0.0:
        return "the gradient was not finite"
    if metrics.get("mismatch/masked_fraction", 0.0) == 1.0:
        return "rollout correction left out every token"
    if metrics.get("advantages/zero_share", 1.0) < 1.0:
        return "the critic learned alone (critic.warmup_steps)"
    if alike:
        return _ALIKE
    if metrics.get("rows", 1.0) == 0.0 and metrics.get("left_out/no_baseline", 0.0) > 0.0:
        return "no task has the score of a greedy rollout"
    return "every advantage was 0"

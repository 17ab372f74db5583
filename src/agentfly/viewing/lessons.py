"""Lessons: whether the steps of a run could teach anything, and what stood in the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_FAILURES = "tool_errors/"


@dataclass
class Lessons:
    """What the metrics of steps say about whether there was anything to learn from.

    Attributes:
        steps: number of steps.
        empty: number of those in which all attempts at each task scored the same, so that no advantage was left.
        calls: number of tool calls.
        failed_calls: number of tool calls that failed, by the kind of failure.
    """

    steps: int = 0
    empty: int = 0
    calls: int = 0
    failed_calls: Counter[str] = field(default_factory=Counter)

    def add(self, metrics: dict[str, float]) -> None:
        """Take in the metrics of one step."""
        self.steps += 1
        self.empty += _taught_nothing(metrics)
        sound = metrics.get("rollouts", 0.0) - metrics.get("failures/infrastructure", 0.0)
        self.calls += round(metrics.get("tool_calls/mean", 0.0) * sound)
        for name, count in metrics.items():
            if name.startswith(_FAILURES) and name != f"{_FAILURES}share":
                self.failed_calls[name.removeprefix(_FAILURES)] += round(count)

    def sentences(self) -> list[str]:
        """What there is to say; nothing if every step taught something and most tool calls went well."""
        told = []
        if self.empty:
            where = "" if self.steps == 1 else f" in {self.empty} of {self.steps} steps"
            told.append(f"nothing to learn from{where}: all attempts at each task scored the same")
        failed = self.failed_calls.total()
        if failed and failed >= self.calls / 2:
            kinds = ", ".join(f"{kind} {count / failed:.0%}" for kind, count in self.failed_calls.most_common(2))
            told.append(f"{failed / max(self.calls, failed):.0%} of the tool calls failed ({kinds})")
        return told


def _taught_nothing(metrics: dict[str, float]) -> bool:
    """Whether every advantage was 0. A loss says otherwise: one algorithm takes rewards as they are."""
    shares = ("groups/zero_variance_share", "groups/singleton_share", "groups/empty_share")
    idle = sum(metrics.get(name, 0.0) for name in shares)
    return idle > 1 - 1e-9 and metrics.get("policy/loss", 0.0) == 0.0

"""Standing: how the evaluations of a run have gone so far, and whether it has seen enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentfly.errors import ConfigError, did_you_mean
from agentfly.training.config.early_stop_config import EarlyStopConfig


@dataclass(frozen=True, slots=True)
class Standing:
    """The evaluations so far, by the metric that is looked at; more is better.

    Attributes:
        best: its best value; None before the first evaluation.
        best_step: the step after which it was that.
        without_best: how many evaluations have come since then.
    """

    best: float | None = None
    best_step: int = 0
    without_best: int = 0

    def after(self, step: int, metrics: Mapping[str, float], metric: str) -> Standing:
        """The standing after one more evaluation.

        Raises:
            ConfigError: no evaluation so far had the metric, this one included.
        """
        value = metrics.get(metric)
        if value is None:
            if self.best is None:
                near = did_you_mean(metric, sorted(metrics))
                raise ConfigError(f"eval_metric={metric!r}: the evaluation has no such metric. {near}")
            return self  # such as the mean of rewards where not one rollout could be scored
        if self.best is None or value > self.best:
            return Standing(value, step, 0)
        return Standing(self.best, self.best_step, self.without_best + 1)

    def verdict(self, rule: EarlyStopConfig | None, metric: str) -> str:
        """Why the run is to end now, in words; empty if it is to go on."""
        if rule is None or self.best is None:
            return ""
        if rule.target is not None and self.best >= rule.target:
            return f"{metric} reached {self.best:.4g} after step {self.best_step}, and the target is {rule.target:.4g}"
        if rule.patience is not None and self.without_best >= rule.patience:
            return (
                f"{metric} has not risen above {self.best:.4g}, found after step {self.best_step}, in "
                f"{self.without_best} evaluations"
            )
        return ""

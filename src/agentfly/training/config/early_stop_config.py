"""EarlyStopConfig: when a run has seen enough."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from agentfly.training.config.settings import Settings


class EarlyStopConfig(Settings):
    """Ends a run before its last step by what evaluations on held-out tasks find."""

    GROUP: ClassVar[str] = "early_stop"

    metric: str = "reward/mean"
    """The evaluation's metric that is looked at; more is better."""
    target: float | None = None
    """The run ends once the metric is at least this; None sets no target."""
    patience: PositiveInt | None = None
    """The run ends after so many evaluations in a row without a new best; None waits for ever."""

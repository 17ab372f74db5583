"""EarlyStopConfig: when a run has seen enough."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import PositiveInt, model_validator

from agentfly.errors import ConfigError
from agentfly.training.config.settings import Settings


class EarlyStopConfig(Settings):
    """Ends a run before its last step by what evaluations on held-out tasks find in ``eval_metric``."""

    GROUP: ClassVar[str] = "early_stop"

    target: float | None = None
    """The run ends once the metric is at least this; None sets no target."""
    patience: PositiveInt | None = None
    """The run ends after so many evaluations in a row without a new best; None waits for ever."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is None and self.patience is None:
            raise ConfigError("early_stop has neither a target nor patience, and would end nothing. Set one of them.")
        return self

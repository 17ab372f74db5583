"""CorrectionConfig: what is done about tokens that were sampled by slightly other weights or kernels."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat, model_validator

from agentfly.errors import ConfigError
from agentfly.training.config.settings import Settings


class CorrectionConfig(Settings):
    """Rollout correction: importance weights between the trainer's own log-probs and those of the sampler.

    The trainer scores each batch before the update. The policy's ratio is then taken to these scores, and each token is
    weighed by the trainer's probability over the sampler's, held within bounds.
    """

    GROUP: ClassVar[str] = "correction"

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Whether weights are a token's own, the product over its row, or the geometric mean over its row."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Whether weights beyond the bounds are moved to them, or their tokens (or rows) left out."""
    upper: PositiveFloat = 2.0
    """The largest weight."""
    lower: PositiveFloat | None = None
    """The smallest weight; if not given, none is too small for ``truncate``, and ``mask`` takes one over ``upper``."""

    @property
    def lowest(self) -> float:
        """The smallest weight that counts, whether given or not."""
        if self.lower is not None:
            return self.lower
        return 1.0 / self.upper if self.mode == "mask" else 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.lowest > self.upper:
            raise ConfigError(
                f"correction.upper={self.upper} is below the smallest weight, {self.lowest}: no token would keep its "
                "weight. Raise upper, or lower correction.lower."
            )
        return self

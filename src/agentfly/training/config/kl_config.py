"""KLConfig: how far the policy may go from the one before training."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from agentfly.training.config.settings import Settings


class KLConfig(Settings):
    """The divergence from the policy before training (the reference), as a penalty."""

    GROUP: ClassVar[str] = "kl"

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty, in reward (or loss) per nat and token. 0 keeps no reference."""
    where: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss, with its gradient, or taken from each token's reward, before advantages."""
    estimator: Literal["k1", "k2", "k3", "low_variance", "full"] = "k3"
    """How it is measured at a token; ``full`` sums over the vocabulary, the others look at the sampled token."""
    target_nats: PositiveFloat | None = None
    """Adapts the coefficient so that the mean divergence per token stays near this; None leaves it as it is."""
    horizon_rows: PositiveInt = 10_000
    """Number of rows over which an adaptive coefficient moves."""

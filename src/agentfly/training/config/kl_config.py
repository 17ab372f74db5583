"""KLConfig: how far the policy may go from the one before training."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from agentfly.errors import ConfigError
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
    gradient: Literal["own", "k2"] = "own"
    """Whether the loss has the estimator's own gradient, or that of ``k2``, which is right on average."""
    target_nats: PositiveFloat | None = None
    """Adapts the coefficient so that the mean divergence per token stays near this; None leaves it as it is."""
    horizon_rows: PositiveInt = 10_000
    """Number of rows over which an adaptive coefficient moves by a fifth, at most."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target_nats is not None and self.coefficient == 0:
            raise ConfigError(
                f"kl.target_nats={self.target_nats} with kl.coefficient=0: what adapts is multiplied step by step, and "
                "stays 0. Set kl.coefficient to where it begins, such as 0.01."
            )
        if self.where == "reward" and self.gradient != "own":
            raise ConfigError(
                f"kl.gradient={self.gradient} with kl.where=reward: a reward has no gradient. Leave it out."
            )
        if self.where == "loss" and self.estimator == "k1" and self.gradient == "own" and self.coefficient > 0:
            raise ConfigError(
                "kl.estimator=k1 with kl.where=loss: the gradient of k1 is 0 on average, and holds nothing back. Set "
                "kl.gradient=k2, or kl.where=reward, or another estimator."
            )
        return self

"""The groups of training settings: advantages, rollout correction, critic, early stopping, KL, LoRA and DAPO."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from agentfly.core.errors import ConfigError
from agentfly.training.config.base import BaseConfig

Share = Annotated[float, Field(ge=0, le=1)]


class AdvantageConfig(BaseConfig):
    """Settings of the advantage estimators. Each estimator reads only its own settings."""

    GROUP: ClassVar[str] = "advantage"

    discount: Share = 1.0
    """Discount factor per sampled token (``gae``, ``reinforce_plus_plus``): gamma."""
    gae_lambda: Share = 1.0
    """Decay factor of temporal-difference errors in ``gae``: lambda."""
    step_discount: Share = 0.95
    """Discount factor per turn in the step returns of ``gigpo``: gamma."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the step advantage relative to the episode advantage in ``gigpo``: omega."""
    divide_by_std: bool = True
    """Whether ``gigpo`` divides by the standard deviation of a group, like ``grpo`` and unlike ``dr_grpo``."""
    anchor_match: Literal["exact", "similar"] = "exact"
    """Whether ``gigpo`` compares turns taken in equal states, or in similar states."""
    anchor_similarity: Share = 0.95
    """Minimum similarity of the texts of two similar states: twice the length of their longest common subsequence of
    characters, divided by the sum of their lengths."""


class CorrectionConfig(BaseConfig):
    """Rollout correction: importance weights for the difference between the trainer's and the sampler's log-probs.

    The trainer scores each batch before the update. The ratio of the loss refers to these scores. The weight of a token
    is the trainer's probability divided by the sampler's, within bounds.
    """

    GROUP: ClassVar[str] = "correction"

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Weights per token, per row as the product over its tokens (``sequence``), or per row as their geometric mean
    (``sequence_mean``)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Whether weights beyond the bounds are clamped to them, or their tokens (or rows) are masked."""
    upper: PositiveFloat = 2.0
    """Largest weight."""
    lower: PositiveFloat | None = None
    """Smallest weight. None for no lower bound with ``truncate``, and for 1 / ``upper`` with ``mask``."""

    @property
    def effective_lower(self) -> float:
        """The smallest weight that counts, whether given or not."""
        if self.lower is not None:
            return self.lower
        return 1.0 / self.upper if self.mode == "mask" else 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.effective_lower > self.upper:
            raise ConfigError(
                f"correction.upper={self.upper} is below the smallest weight, {self.effective_lower}: no token would "
                "keep its weight. Raise upper, or lower correction.lower."
            )
        return self


class CriticConfig(BaseConfig):
    """The critic: a copy of the model with one output, the value of the state in which each token is chosen.

    It shares other optimizer settings with the policy, such as betas, weight decay and ``mini_batches``.
    """

    GROUP: ClassVar[str] = "critic"

    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the critic's AdamW, per update; it has no schedule."""
    updates_per_step: PositiveInt = 1
    """Number of passes of the critic over each batch (epochs)."""
    clip_value: PositiveFloat | None = 0.5
    """Maximum change of a value in one step, in units of reward. None for no limit."""
    warmup_steps: NonNegativeInt = 0
    """Number of initial steps in which only the critic learns."""


class EarlyStopConfig(BaseConfig):
    """Ends a run before its last step, depending on the metric ``eval_metric`` of evaluations."""

    GROUP: ClassVar[str] = "early_stop"

    target: float | None = None
    """The run ends when the metric reaches this value. None for no target."""
    patience: PositiveInt | None = None
    """The run ends after this number of consecutive evaluations without a new best. None for no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is None and self.patience is None:
            raise ConfigError("early_stop has neither a target nor patience, and would end nothing. Set one of them.")
        return self


class KLConfig(BaseConfig):
    """A penalty on the divergence from the policy before training (the reference)."""

    GROUP: ClassVar[str] = "kl"

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty, in reward (or loss) per nat and token. 0 for no penalty; no reference is kept."""
    where: Literal["loss", "reward"] = "loss"
    """Whether the penalty is added to the loss, with its gradient, or subtracted from each token's reward before
    advantages are computed."""
    estimator: Literal["k1", "k2", "k3", "low_variance", "full"] = "k3"
    """Estimator of the divergence at a token. ``full`` sums over the vocabulary; the others use only the sampled
    token."""
    gradient: Literal["own", "k2"] = "own"
    """Whether the loss has the estimator's own gradient, or the gradient of ``k2``, which is unbiased."""
    target_nats: PositiveFloat | None = None
    """Adapts the coefficient so that the mean divergence per token stays near this. None keeps it constant."""
    horizon_rows: PositiveInt = 10_000
    """Number of rows in which an adaptive coefficient changes by at most about a fifth."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target_nats is not None and self.coefficient == 0:
            raise ConfigError(
                f"kl.target_nats={self.target_nats} with kl.coefficient=0: what adapts is multiplied step by step, and "
                "stays 0. Set kl.coefficient to its initial value, such as 0.01."
            )
        if self.where == "reward" and self.gradient != "own":
            raise ConfigError(
                f"kl.gradient={self.gradient} with kl.where=reward: a reward has no gradient. Leave it out."
            )
        if self.where == "loss" and self.estimator == "k1" and self.gradient == "own" and self.coefficient > 0:
            raise ConfigError(
                "kl.estimator=k1 with kl.where=loss: the gradient of k1 is 0 on average, so it has no effect. Set "
                "kl.gradient=k2, or kl.where=reward, or another estimator."
            )
        return self


class LoRAConfig(BaseConfig):
    """Low-rank adapters (peft), in the number format of the model's weights. The weights themselves do not change.

    A checkpoint contains only the adapters. When it is loaded as a model, they are merged into the initial model.

    Source: LoRA, https://arxiv.org/abs/2106.09685.
    """

    GROUP: ClassVar[str] = "lora"

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """The output of the adapters is scaled by ``alpha`` / ``rank``."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' input that is dropped in training. Above 0, log-probs of training and sampling differ."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Names of the modules with adapters, or ``all-linear``."""


class DynamicSamplingConfig(BaseConfig):
    """Replaces groups without a learning signal, in which all rewards are equal, by groups of other tasks.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2.
    """

    GROUP: ClassVar[str] = "dynamic_sampling"

    max_refills: PositiveInt = 3
    """Maximum number of rounds per step that replace groups without a learning signal. Groups that still have none are
    then dropped."""


class OverlongConfig(BaseConfig):
    """A penalty that rises before the limit on the length of a trajectory.

    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """

    GROUP: ClassVar[str] = "overlong"

    max_tokens: PositiveInt
    """Number of sampled tokens of a trajectory at which the penalty is complete."""
    buffer_tokens: PositiveInt
    """Number of tokens before ``max_tokens`` over which the penalty rises from 0."""
    penalty: NonNegativeFloat = 1.0
    """Reward that is subtracted at ``max_tokens`` and beyond."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ConfigError(
                f"overlong.buffer_tokens={self.buffer_tokens} is more than overlong.max_tokens={self.max_tokens}: "
                "the penalty would start before the first token. Lower buffer_tokens."
            )
        return self

"""The groups of training settings: advantages, rollout correction, critic, early stopping, KL, LoRA and DAPO."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from agentfly.core.errors import ConfigError
from agentfly.training.config.base import BaseConfig

Share = Annotated[float, Field(ge=0, le=1)]


class AdvantageConfig(BaseConfig):
    """What the estimators of advantages can be told; each reads its own part."""

    GROUP: ClassVar[str] = "advantage"

    discount: Share = 1.0
    """Weight of what comes one token later (``gae``, ``reinforce_plus_plus``): gamma."""
    gae_lambda: Share = 1.0
    """Weight of longer looks ahead in ``gae``: lambda."""
    step_discount: Share = 0.95
    """Weight of what comes one turn later in the step returns of ``gigpo``: gamma."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the step advantage beside the episode's in ``gigpo``: omega."""
    divide_by_std: bool = True
    """Whether ``gigpo`` divides by the standard deviation of a group, as ``grpo`` does and ``dr_grpo`` does not."""
    anchor_match: Literal["exact", "similar"] = "exact"
    """Whether ``gigpo`` compares turns taken in the same state, or in states that are alike."""
    anchor_similarity: Share = 0.95
    """Share of two states' text that must agree for them to be alike: twice their longest common subsequence of
    characters over both lengths."""


class CorrectionConfig(BaseConfig):
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

    What it has in common with the policy's optimizer, such as betas, weight decay and ``mini_batches``, is set once.
    """

    GROUP: ClassVar[str] = "critic"

    learning_rate: PositiveFloat = 1e-5
    """Learning rate of its AdamW, per update; it has no schedule."""
    updates_per_step: PositiveInt = 1
    """Number of times it learns from each batch: epochs."""
    clip_value: PositiveFloat | None = 0.5
    """A value may move so far from what it was before the step, in units of reward; None lets it go."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which the critic alone learns."""


class EarlyStopConfig(BaseConfig):
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


class KLConfig(BaseConfig):
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


class LoRAConfig(BaseConfig):
    """Low-rank adapters (peft) that are trained while the model's own weights stay, in the weights' number format.

    A checkpoint holds the adapters alone. Loaded as a model, they are merged into that which training began with.

    Source: LoRA, https://arxiv.org/abs/2106.09685.
    """

    GROUP: ClassVar[str] = "lora"

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """The adapters' output is scaled by this over the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' input that is dropped while training. Above 0, trained and sampled log-probs differ."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Names of the modules that get adapters, or ``all-linear``."""


class DynamicSamplingConfig(BaseConfig):
    """Groups whose rewards are all equal teach nothing: other tasks are tried in their place.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2.
    """

    GROUP: ClassVar[str] = "dynamic_sampling"

    max_refills: PositiveInt = 3
    """How often a step may roll out more tasks in place of groups without variance. What is left then is dropped."""


class OverlongConfig(BaseConfig):
    """A penalty that rises before the limit on an answer's length.

    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """

    GROUP: ClassVar[str] = "overlong"

    max_tokens: PositiveInt
    """Number of sampled tokens of a trajectory at which the penalty is whole."""
    buffer_tokens: PositiveInt
    """Number of tokens before ``max_tokens`` over which it rises from 0."""
    penalty: NonNegativeFloat = 1.0
    """What is taken from the reward at ``max_tokens`` and beyond."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ConfigError(
                f"overlong.buffer_tokens={self.buffer_tokens} is more than overlong.max_tokens={self.max_tokens}: "
                "the penalty would begin before the first token. Lower buffer_tokens."
            )
        return self

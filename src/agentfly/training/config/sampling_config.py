"""DynamicSamplingConfig and OverlongConfig: what DAPO does about groups that teach nothing and answers without end."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from agentfly.errors import ConfigError
from agentfly.training.config.settings import Settings


class DynamicSamplingConfig(Settings):
    """Groups whose rewards are all equal teach nothing: other tasks are tried in their place.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2.
    """

    GROUP: ClassVar[str] = "dynamic_sampling"

    max_refills: PositiveInt = 3
    """How often a step may roll out more tasks in place of groups without variance. What is left then is dropped."""


class OverlongConfig(Settings):
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

"""CriticConfig: the model of values that ``gae`` needs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from agentfly.training.config.settings import Settings


class CriticConfig(Settings):
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

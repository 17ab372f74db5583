"""LoRAConfig: training adapters in place of all weights."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from agentfly.training.config.settings import Settings


class LoRAConfig(Settings):
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

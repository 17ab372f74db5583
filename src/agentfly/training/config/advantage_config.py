"""AdvantageConfig: what the estimators of advantages can be told."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from agentfly.training.config.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]


class AdvantageConfig(Settings):
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

"""CorrectionConfig: what is done about tokens that were sampled by slightly other weights or kernels."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat

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
    """Whether weights above the bound are lowered to it, or their tokens (or rows) left out."""
    upper: PositiveFloat = 2.0
    """The largest weight."""
    lower: PositiveFloat | None = None
    """The smallest weight, below which ``mask`` leaves out; one over ``upper`` if not given."""

"""The learning rate of a step: a pure function of the settings and the step's number."""

from __future__ import annotations

import math
from typing import assert_never

from agentfly.training.config.train_config import TrainConfig


def rate_share(config: TrainConfig, step: int) -> float:
    """Share of the full learning rate in a step: it rises over the warm-up, then follows the schedule.

    In the warm-up of W steps, step s has ``(s + 1) / W``. After it, what is left of the way to ``steps`` takes it down
    to ``final_learning_rate_share``, in a line or along half a cosine, where it would be in the step after the last.

    Args:
        config: the settings.
        step: number of the step, from 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1))
    match config.schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(config.schedule)
    return config.final_learning_rate_share + (1.0 - config.final_learning_rate_share) * left

"""The learning rate of a step: a pure function of its number."""

from __future__ import annotations

import math
from typing import Literal, assert_never

Schedule = Literal["constant", "linear", "cosine"]


def rate_share(step: int, *, steps: int, warmup: int, schedule: Schedule, final_share: float = 0.0) -> float:
    """Share of the full learning rate in a step: it rises over the warm-up, then follows the schedule.

    In the warm-up of W steps, step s has ``(s + 1) / W``. After it, what is left of the way to ``steps`` takes it down
    to ``final_share``, in a line or along half a cosine, where it would be in the step after the last.

    Args:
        step: number of the step, from 0.
        steps: number of steps of the run.
        warmup: number of steps over which the rate rises.
        schedule: how it falls after them.
        final_share: where it falls to.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(steps - warmup, 1))
    match schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(schedule)
    return final_share + (1.0 - final_share) * left

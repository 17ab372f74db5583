"""Estimators that judge an outcome: all sampled tokens of a trajectory share one advantage.

It is made from the trajectory's reward and those of the other attempts at the same task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentfly.training.advantages.algorithm import Advantages, Estimator, Evidence, Floats
from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.rows import Row

OutcomeEstimator: TypeAlias = "Callable[[Floats], Floats]"
"""From the rewards of the trajectories of one group, shape [G], to their advantages, shape [G]."""

_ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest are equal: their difference is rounding, and dividing by
its standard deviation would make it as large as a real one."""


def by_group(outcome: OutcomeEstimator) -> Estimator:
    """The estimator that applies ``outcome`` to the rewards of each group, a trajectory counting once."""

    def estimate(evidence: Evidence, config: AdvantageConfig) -> Advantages:
        return Advantages(spread(evidence.rows, by_trajectory(evidence.rows, outcome)))

    return estimate


def by_trajectory(rows: Sequence[Row], outcome: OutcomeEstimator) -> dict[tuple[str, str], float]:
    """What ``outcome`` makes of each trajectory, by its ``group_id`` and ``rollout_id``."""
    import numpy as np

    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(row.group_id, {})[row.rollout_id] = row.reward
    judged: dict[tuple[str, str], float] = {}
    for group_id, rewards in groups.items():
        values = outcome(np.array(list(rewards.values()), dtype=np.float64))
        judged.update(((group_id, rollout), float(value)) for rollout, value in zip(rewards, values, strict=True))
    return judged


def spread(rows: Sequence[Row], judged: dict[tuple[str, str], float]) -> list[Floats]:
    """The value of its trajectory at each sampled token of each row."""
    import numpy as np

    return [np.full(len(row.targets), judged[row.group_id, row.rollout_id]) for row in rows]


def grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean, over the group's sample standard deviation; 0 where all rewards are equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    centred = dr_grpo(rewards)
    if (largest := abs(centred).max()) > 0:
        centred /= largest  # so that neither huge nor tiny rewards leave the range of numbers
        centred /= centred.std(ddof=1)
    return centred


def dr_grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean; 0 where all rewards are equal, as in a group of one.

    Without the standard deviation, tasks that are almost always or almost never solved weigh no more than others.
    Source: Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    if rewards.max() - rewards.min() <= _ROUNDING * abs(rewards).max():
        return rewards * 0.0
    return rewards - float((rewards / 2).mean()) * 2


def rloo(rewards: Floats) -> Floats:
    """Reward less the mean of the *other* attempts of the group; 0 in a group of one, which has no others.

    Source: Back to Basics, https://arxiv.org/abs/2402.14740, equation 7.
    """
    count = len(rewards)
    return dr_grpo(rewards) * (count / (count - 1)) if count > 1 else rewards * 0.0


def reinforce(rewards: Floats) -> Floats:
    """The reward itself, with no baseline: the plain policy gradient.

    Source: Williams, Simple statistical gradient-following algorithms, 1992.
    """
    return rewards.copy()

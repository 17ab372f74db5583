"""Advantages: how much better than expected each sampled token turned out.

An advantage estimator is a pure function from the rows of one batch to one array a row, with one value for each
sampled token of the row. `ALGORITHMS` holds them by name, and the configuration's ``algorithm`` chooses one.

The estimators here judge an outcome: all sampled tokens of a trajectory share one advantage, made from its reward
and those of the other attempts at the same task. They count trajectories, never rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from agentfly.training.registry import Registry
from agentfly.training.rows import Row

if TYPE_CHECKING:  # the names of the algorithms are wanted where numpy is not installed, too
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
Estimator: TypeAlias = "Callable[[Sequence[Row]], list[Floats]]"
"""From rows to advantages: for each row, an array of length ``len(row.targets)``."""

OutcomeEstimator: TypeAlias = "Callable[[Floats], Floats]"
"""From the rewards of the trajectories of one group, shape [G], to their advantages, shape [G]."""


@dataclass(frozen=True)
class Algorithm:
    """How a batch is judged.

    Attributes:
        estimate: makes the advantages.
        min_attempts: with fewer attempts at a task than this, every advantage is 0 and nothing can be learned.
    """

    estimate: Estimator
    min_attempts: int = 1


ALGORITHMS: Registry[Algorithm] = Registry("algorithm")

_ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest are equal: their difference is rounding, and dividing by
its standard deviation would make it as large as a real one."""


def by_group(outcome: OutcomeEstimator) -> Estimator:
    """The estimator that applies ``outcome`` to the rewards of each group, a trajectory counting once."""

    def estimate(rows: Sequence[Row]) -> list[Floats]:
        import numpy as np

        groups: dict[str, dict[str, float]] = {}
        for row in rows:
            groups.setdefault(row.group_id, {})[row.rollout_id] = row.reward
        advantages: dict[tuple[str, str], float] = {}
        for group_id, rewards in groups.items():
            values = outcome(np.array(list(rewards.values()), dtype=np.float64))
            advantages.update(
                ((group_id, rollout_id), float(value)) for rollout_id, value in zip(rewards, values, strict=True)
            )
        return [np.full(len(row.targets), advantages[row.group_id, row.rollout_id]) for row in rows]

    return estimate


def grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean, over the group's sample standard deviation; 0 where all rewards are equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    centred = grpo_without_std(rewards)
    if (largest := abs(centred).max()) > 0:
        centred /= largest  # so that neither huge nor tiny rewards leave the range of numbers
        centred /= centred.std(ddof=1)
    return centred


def grpo_without_std(rewards: Floats) -> Floats:
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
    return grpo_without_std(rewards) * (count / (count - 1)) if count > 1 else rewards * 0.0


def reinforce(rewards: Floats) -> Floats:
    """The reward itself, with no baseline: the plain policy gradient.

    Source: Williams, Simple statistical gradient-following algorithms, 1992.
    """
    return rewards.copy()


ALGORITHMS.register("grpo", Algorithm(by_group(grpo), min_attempts=2))
ALGORITHMS.register("grpo_without_std", Algorithm(by_group(grpo_without_std), min_attempts=2))
ALGORITHMS.register("rloo", Algorithm(by_group(rloo), min_attempts=2))
ALGORITHMS.register("reinforce", Algorithm(by_group(reinforce)))

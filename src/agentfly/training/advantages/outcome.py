"""Estimators that judge an outcome: all sampled tokens of a trajectory share one advantage.

It is made of the trajectory's reward and those of the other attempts at the same task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentfly.training.advantages.algorithm import Advantages, Estimator, Evidence, Floats
from agentfly.training.advantages.attempts import Attempt, attempts_by_group, spread
from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.equality import are_equal, difference, rounding

OutcomeEstimator: TypeAlias = "Callable[[Floats], Floats]"
"""From the rewards of the trajectories of one group, shape [G], to their advantages, shape [G]."""

GroupEstimator: TypeAlias = "Callable[[Sequence[Attempt]], Floats]"
"""From the trajectories of one group to their advantages, shape [G]."""


def by_group(outcome: OutcomeEstimator) -> Estimator:
    """The estimator that applies ``outcome`` to the rewards of each group, a trajectory counting once."""
    return _by_attempts(lambda attempts: outcome(rewards_of(attempts)))


def _by_attempts(judge: GroupEstimator) -> Estimator:
    def estimate(evidence: Evidence, config: AdvantageConfig) -> Advantages:
        judged: list[tuple[Attempt, float]] = []
        for attempts in attempts_by_group(evidence).values():
            judged.extend(zip(attempts, judge(attempts).tolist(), strict=True))
        return Advantages(spread(evidence.rows, judged))

    return estimate


def rewards_of(attempts: Sequence[Attempt]) -> Floats:
    """The rewards of attempts, shape [G]."""
    import numpy as np

    return np.array([attempt.reward for attempt in attempts], dtype=np.float64)


def grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean, over the group's sample standard deviation; 0 where all rewards are equal.

    Others add a small number to the standard deviation, so that equal rewards do not divide by 0. Nothing is added
    here, so that rewards that differ by little are told apart as well as others. Differences that are rounding
    (`agentfly.training.equality`) are none.
    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    centred = dr_grpo(rewards)
    if (largest := abs(centred).max()) > 0:
        centred /= largest  # so that huge rewards do not leave the range of numbers
        centred /= centred.std(ddof=1)
    return centred


def dr_grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean; 0 where all rewards are equal, as in a group of one.

    Without the standard deviation, tasks that are almost always or almost never solved weigh no more than others.
    Source: Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    if are_equal(rewards.min(), rewards.max()):
        return rewards * 0.0
    return rewards - float((rewards / 2).mean()) * 2


def rloo(rewards: Floats) -> Floats:
    """Reward less the mean of the *other* attempts of the group; 0 in a group of one, which has no others.

    Source: Back to Basics, https://arxiv.org/abs/2402.14740, equation 7.
    """
    count = len(rewards)
    return dr_grpo(rewards) * (count / (count - 1)) if count > 1 else rewards * 0.0


def reinforce(rewards: Floats) -> Floats:
    """The reward itself, with no baseline: the plain policy gradient. A reward that is 0 but for rounding is 0.

    Source: Williams, Simple statistical gradient-following algorithms, 1992.
    """
    return difference(rewards, 0.0)


def ranking(rewards: Floats) -> Floats:
    """The place among the attempts, evenly from 1/2 for the best to -1/2 for the worst; 0 in a group of one.

    Equal rewards share the mean of their places, so the advantages of a group sum to 0. By how much one attempt is
    better than another does not count, as with a judge that puts attempts in order (`Judge.rank`), whose numbers mean
    nothing else.
    """
    count = len(rewards)
    if count < 2:
        return rewards * 0.0
    better_by = rewards[:, None] - rewards[None, :]
    least = rounding(abs(rewards).max())
    worse = (better_by > least).sum(axis=1)
    alike = (abs(better_by) <= least).sum(axis=1)
    places: Floats = (worse + (alike - 1) / 2) / (count - 1) - 0.5
    return places


def opo(rewards: Floats, tokens: Floats) -> Floats:
    """Reward less the mean of the group's rewards, in which each attempt weighs as much as it has sampled tokens.

    That baseline leaves the least variance where a trajectory's squared gradient grows with its length.
    Source: On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585; as verl 0.9's ``opo``.
    """
    from_mean = dr_grpo(rewards)
    return from_mean - float((tokens * from_mean).sum() / tokens.sum())


def opo_of_attempts(attempts: Sequence[Attempt]) -> Floats:
    """`opo` of one group."""
    import numpy as np

    return opo(rewards_of(attempts), np.array([attempt.tokens for attempt in attempts], dtype=np.float64))


GRPO = by_group(grpo)
DR_GRPO = by_group(dr_grpo)
RLOO = by_group(rloo)
REINFORCE = by_group(reinforce)
RANKING = by_group(ranking)
OPO = _by_attempts(opo_of_attempts)

"""Outcome estimators: all sampled tokens of a trajectory share one advantage.

It is computed from the rewards of the attempts at the same task. Each trajectory counts once, however many rows it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentfly.training.advantages.algorithm import (
    AdvantageInputs,
    Advantages,
    Estimator,
    Floats,
    nearly_equal,
    subtract_with_tolerance,
    tolerance,
)
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row


@dataclass
class Attempt:
    """A trajectory of a batch with all its rows, including those of memory and subagents.

    Attributes:
        rollout_id: the trajectory.
        reward: its reward, including its token rewards.
        tokens: number of its sampled tokens.
        rows: indices, in the batch, of its rows with sampled tokens.
    """

    rollout_id: str
    reward: float
    tokens: int = 0
    rows: list[int] = field(default_factory=list)


def attempts_by_group(evidence: AdvantageInputs) -> dict[str, list[Attempt]]:
    """Return the trajectories of each group that have a sampled token."""
    groups: dict[str, dict[str, Attempt]] = {}
    for number, row in enumerate(evidence.rows):
        if not row.targets:
            continue
        group = groups.setdefault(row.group_id, {})
        attempt = group.setdefault(row.rollout_id, Attempt(row.rollout_id, row.reward))
        attempt.rows.append(number)
        attempt.tokens += len(row.targets)
        if evidence.token_rewards is not None:
            attempt.reward += float(evidence.token_rewards[number].sum())
    return {group_id: list(group.values()) for group_id, group in groups.items()}


def broadcast_to_tokens(rows: Sequence[Row], judged: Iterable[tuple[Attempt, float]]) -> list[Floats]:
    """Return for each sampled token of each row the value of its trajectory."""
    import numpy as np

    values = [np.zeros(len(row.targets)) for row in rows]
    for attempt, value in judged:
        for number in attempt.rows:
            values[number] += value
    return values


OutcomeEstimator: TypeAlias = "Callable[[Floats], Floats]"
"""From the rewards of the trajectories of one group, shape [G], to their advantages, shape [G]."""

GroupEstimator: TypeAlias = "Callable[[Sequence[Attempt]], Floats]"
"""From the trajectories of one group to their advantages, shape [G]."""


def group_estimator(outcome: OutcomeEstimator) -> Estimator:
    """Return the estimator that applies ``outcome`` to the rewards of each group, one per trajectory."""
    return _attempt_estimator(lambda attempts: outcome(rewards_of(attempts)))


def _attempt_estimator(judge: GroupEstimator) -> Estimator:
    def estimate(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
        judged: list[tuple[Attempt, float]] = []
        for attempts in attempts_by_group(evidence).values():
            judged.extend(zip(attempts, judge(attempts).tolist(), strict=True))
        return Advantages(broadcast_to_tokens(evidence.rows, judged))

    return estimate


def rewards_of(attempts: Sequence[Attempt]) -> Floats:
    """The rewards of attempts, shape [G]."""
    import numpy as np

    return np.array([attempt.reward for attempt in attempts], dtype=np.float64)


def grpo(rewards: Floats) -> Floats:
    """Reward less the group's mean, over the group's sample standard deviation; 0 where all rewards are equal.

    Other frameworks add a small number to the standard deviation to avoid a division by 0. This one does not, so that
    small differences between rewards count as much as large ones. Differences within rounding
    (`agentfly.training.advantages.algorithm`) count as 0.
    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    centred = dr_grpo(rewards)
    if (largest := abs(centred).max()) > 0:
        centred /= largest  # so that huge rewards do not leave the range of numbers
        centred /= centred.std(ddof=1)
    return centred


def dr_grpo(rewards: Floats) -> Floats:
    """Return each reward minus the group's mean; 0 if all rewards are equal, as in a group of one.

    Without the standard deviation, tasks that are almost always or almost never solved weigh no more than others.
    Source: Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    if nearly_equal(rewards.min(), rewards.max()):
        return rewards * 0.0
    return rewards - float((rewards / 2).mean()) * 2


def rloo(rewards: Floats) -> Floats:
    """Return each reward minus the mean of the *other* attempts of the group; 0 in a group of one.

    Source: Back to Basics, https://arxiv.org/abs/2402.14740, equation 7.
    """
    count = len(rewards)
    return dr_grpo(rewards) * (count / (count - 1)) if count > 1 else rewards * 0.0


def reinforce(rewards: Floats) -> Floats:
    """Return the reward itself, without a baseline (plain policy gradient). A reward within rounding of 0 becomes 0.

    Source: Williams, Simple statistical gradient-following algorithms, 1992.
    """
    return subtract_with_tolerance(rewards, 0.0)


def ranking(rewards: Floats) -> Floats:
    """Return the rank among the attempts, scaled evenly from 1/2 for the best to -1/2 for the worst; 0 for one attempt.

    Equal rewards share the mean of their ranks, so the advantages of a group sum to 0. The size of a reward difference
    does not count. This suits rewards that only order the attempts, such as those of `Judge.rank`.
    """
    count = len(rewards)
    if count < 2:
        return rewards * 0.0
    better_by = rewards[:, None] - rewards[None, :]
    least = tolerance(abs(rewards).max())
    worse = (better_by > least).sum(axis=1)
    alike = (abs(better_by) <= least).sum(axis=1)
    ranks: Floats = (worse + (alike - 1) / 2) / (count - 1) - 0.5
    return ranks


def opo(rewards: Floats, tokens: Floats) -> Floats:
    """Return each reward minus the group's mean reward, weighted by the numbers of sampled tokens.

    This baseline minimizes the variance if a trajectory's squared gradient grows with its length.
    Source: On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585; as verl 0.9's ``opo``.
    """
    from_mean = dr_grpo(rewards)
    return from_mean - float((tokens * from_mean).sum() / tokens.sum())


def opo_of_attempts(attempts: Sequence[Attempt]) -> Floats:
    """Apply `opo` to one group."""
    import numpy as np

    return opo(rewards_of(attempts), np.array([attempt.tokens for attempt in attempts], dtype=np.float64))


GRPO = group_estimator(grpo)
DR_GRPO = group_estimator(dr_grpo)
RLOO = group_estimator(rloo)
REINFORCE = group_estimator(reinforce)
RANKING = group_estimator(ranking)
OPO = _attempt_estimator(opo_of_attempts)

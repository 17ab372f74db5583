"""Estimators that look at what comes after each token: REINFORCE++, ReMax and GAE."""

from __future__ import annotations

from agentfly.errors import UsageError
from agentfly.training.advantages.algorithm import Advantages, Evidence, Floats
from agentfly.training.advantages.outcome import DR_GRPO
from agentfly.training.advantages.timeline import Timeline, along_time
from agentfly.training.advantages.whitening import whitened
from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.equality import difference


def reinforce_plus_plus(evidence: Evidence, config: AdvantageConfig) -> Advantages:
    """The discounted return from each token on, whitened over the batch's tokens.

    With the KL penalty among the tokens' rewards, as in the paper, a token's return is the trajectory's reward less the
    penalties from the token on. Groups do not count.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262; as verl 0.9's ``reinforce_plus_plus``.
    """
    returns = along_time(evidence, lambda timeline, rewards: timeline.returns(rewards, config.discount))
    return Advantages(whitened(returns))


def reinforce_plus_plus_baseline(evidence: Evidence, config: AdvantageConfig) -> Advantages:
    """The reward less the group's mean, the same at all tokens of a trajectory, whitened over the batch's tokens.

    A group of one gives 0 before whitening, where verl 0.9's ``reinforce_plus_plus_baseline`` gives the reward itself.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, the variant with a baseline.
    """
    return Advantages(whitened(DR_GRPO(evidence, config).values))


def remax(evidence: Evidence, config: AdvantageConfig) -> Advantages:
    """The return from each token on, not discounted, less the reward of the greedy rollout of the same task.

    Source: ReMax, https://arxiv.org/abs/2310.10505; as verl 0.9's ``remax``.

    Raises:
        UsageError: the reward of the greedy rollout of a group is not among the evidence.
    """

    def judge(timeline: Timeline, rewards: Floats) -> Floats:
        baselines = evidence.baselines or {}
        if timeline.group_id not in baselines:
            raise UsageError(
                f"remax needs the reward of a greedy rollout of each task, and there is none of group "
                f"{timeline.group_id!r}. Leave out the rows of groups without one."
            )
        return difference(timeline.returns(rewards, 1.0), baselines[timeline.group_id])

    return Advantages(along_time(evidence, judge))


def gae(evidence: Evidence, config: AdvantageConfig) -> Advantages:
    """Generalized advantage estimation with the critic's values; whitened over the batch's tokens.

    Steps are sampled tokens: what was read in between is none, so that discount and lambda go from the last token of a
    turn to the first of the next. The critic's targets, the returns, are made before whitening, which counts tokens as
    verl 0.9's ``gae`` does.
    Source: Generalized Advantage Estimation, https://arxiv.org/abs/1506.02438, equation 16.

    Raises:
        UsageError: the critic's values are not among the evidence.
    """
    values = evidence.values
    if values is None:
        raise UsageError("gae needs the critic's value of each sampled token: give the evidence values.")

    def judge(timeline: Timeline, rewards: Floats) -> Floats:
        expected = timeline.gather(values)
        surprises = rewards + config.discount * timeline.next_values(expected) - expected
        return timeline.returns(surprises, config.discount * config.gae_lambda)

    advantages = along_time(evidence, judge)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    surprising = [difference(coming, value) for coming, value in zip(returns, values, strict=True)]
    return Advantages(whitened(surprising), returns)

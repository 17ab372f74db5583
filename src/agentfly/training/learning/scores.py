"""Scores: what models say of the sampled tokens of a batch before it is learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.json_values import Brief
from agentfly.training.advantages import Floats


@dataclass(frozen=True, repr=False)
class Scores(Brief):
    """What models say of the sampled tokens of a batch before it is learned from; only what the settings ask for.

    Each is one array a row, with one value for each of the row's sampled tokens.

    Attributes:
        old_logprobs: log-probs under the trained weights, before the update.
        values: the critic's value of the state in which each token was chosen, in units of reward.
        token_rewards: what is added to the reward at each token: the penalty for diverging from the policy before
            training, where it is taken from the reward.
    """

    old_logprobs: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None
    token_rewards: Sequence[Floats] | None = None

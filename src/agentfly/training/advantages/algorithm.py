"""Algorithm: an advantage estimator with its requirements, inputs and results, and the numerics that estimators share.

AdamW, and estimators that divide by a standard deviation, turn a difference of any size into an update of full size.
Differences that rounding can explain must therefore become exactly 0 first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from agentfly.core.json_values import Brief
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row

if TYPE_CHECKING:  # the names of the algorithms are also needed where numpy is not installed
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True, repr=False)
class AdvantageInputs(Brief):
    """The inputs of an advantage estimator for one batch.

    Values per token are sequences with one array per row, each with one float per sampled token (``len(row.targets)``).

    Attributes:
        rows: the trained rows.
        values: the critic's value of the state in which each token was sampled; None without a critic.
        token_rewards: reward of each token, besides the trajectory's reward: minus the KL penalty with
            ``kl.where=reward``. None if there is none.
        baselines: reward of the greedy rollout of a group's task, by ``group_id``; None without greedy rollouts.
    """

    rows: Sequence[Row]
    values: Sequence[Floats] | None = None
    token_rewards: Sequence[Floats] | None = None
    baselines: Mapping[str, float] | None = None


@dataclass(frozen=True, repr=False)
class Advantages(Brief):
    """The advantages of a batch: one array per row, with one float per sampled token.

    Attributes:
        values: the advantages.
        returns: the critic's targets; None from estimators without a critic.
    """

    values: list[Floats]
    returns: list[Floats] | None = None


Estimator: TypeAlias = "Callable[[AdvantageInputs, AdvantageConfig], Advantages]"


@dataclass(frozen=True)
class Algorithm:
    """An advantage estimator and its requirements.

    Attributes:
        estimate: computes the advantages; a pure function.
        min_attempts: with fewer attempts at a task than this, every advantage is 0 and nothing can be learned.
        needs_critic: whether it reads ``AdvantageInputs.values`` and gives ``Advantages.returns``.
        needs_greedy: whether it reads ``AdvantageInputs.baselines``.
        supports_dynamic_sampling: whether a group without a learning signal has only zero advantages when it is
            estimated alone. ``dynamic_sampling`` needs that.
        uses: names of the settings in `AdvantageConfig` that it reads. Other settings are rejected.
        unused_setting_hints: for settings that it does not read, a sentence with the alternative.
    """

    estimate: Estimator
    min_attempts: int = 1
    needs_critic: bool = False
    needs_greedy: bool = False
    supports_dynamic_sampling: bool = False
    uses: tuple[str, ...] = ()
    unused_setting_hints: Mapping[str, str] = field(default_factory=dict)


# --- numerics ---------------------------------------------------------------------------------------------------------

RELATIVE_TOLERANCE = 1e-6
"""Differences up to this fraction of the largest number (at least of 1) count as rounding.

Rewards often come from float32 numbers with 7 digits, or from sums and differences of numbers of about 1.
"""


def tolerance(*numbers: float) -> float:
    """Return the largest difference at which these numbers count as equal."""
    return RELATIVE_TOLERANCE * max(1.0, *(abs(number) for number in numbers))


def nearly_equal(lowest: float, highest: float) -> bool:
    """Return whether all numbers between ``lowest`` and ``highest`` count as equal."""
    return highest - lowest <= tolerance(lowest, highest)


def subtract_with_tolerance(values: Floats, others: Floats | float) -> Floats:
    """Return ``values - others``, exactly 0 where the two count as equal; in the shape of ``values``."""
    import numpy as np

    differences = values - others
    largest = np.maximum(1.0, np.maximum(np.abs(values), np.abs(others)))
    return np.where(np.abs(differences) <= RELATIVE_TOLERANCE * largest, 0.0, differences)


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Return the values minus their mean over their sample standard deviation, both taken over all tokens of the batch.

    Long trajectories therefore weigh more than short ones. REINFORCE++ (https://arxiv.org/abs/2501.03262) and verl 0.9
    (``masked_whiten``, divisor N - 1) normalize in the same way, except that verl adds 1e-8 to the variance. If all
    values are equal up to rounding, the result is 0.
    """
    import numpy as np

    tokens = np.concatenate([np.empty(0), *values])
    if not len(tokens) or nearly_equal(tokens.min(), tokens.max()):
        return [value * 0.0 for value in values]
    mean, std = tokens.mean(), tokens.std(ddof=1)
    return [(value - mean) / std for value in values]

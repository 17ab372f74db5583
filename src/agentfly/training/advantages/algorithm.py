"""Algorithm: how a batch is judged, from the evidence about it to the advantage of each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from agentfly.core.json_values import Brief
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row

if TYPE_CHECKING:  # the names of the algorithms are wanted where numpy is not installed, too
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True, repr=False)
class AdvantageInputs(Brief):
    """What is known of a batch before it is judged.

    All that is told a token is a sequence of one array a row, with one float for each sampled token of the row: an
    array of length ``len(row.targets)``.

    Attributes:
        rows: the rows that are trained on. Rows of what may not be trained on are not among them.
        values: what the critic expected to come, just before each token was sampled; None without a critic.
        token_rewards: what each token earned by itself, beside the trajectory's reward: minus the KL penalty where it
            belongs to the reward. None if nothing did.
        baselines: reward of the greedy rollout of a group's task, by ``group_id``; None where none was made.
    """

    rows: Sequence[Row]
    values: Sequence[Floats] | None = None
    token_rewards: Sequence[Floats] | None = None
    baselines: Mapping[str, float] | None = None


@dataclass(frozen=True, repr=False)
class Advantages(Brief):
    """How a batch was judged, one array a row, with one float for each sampled token of the row.

    Attributes:
        values: how much better than expected the token turned out.
        returns: what the critic should have expected there; None from estimators without a critic.
    """

    values: list[Floats]
    returns: list[Floats] | None = None


Estimator: TypeAlias = "Callable[[AdvantageInputs, AdvantageConfig], Advantages]"


@dataclass(frozen=True)
class Algorithm:
    """A way of judging a batch.

    Attributes:
        estimate: makes the advantages; a pure function.
        min_attempts: with fewer attempts at a task than this, every advantage is 0 and nothing can be learned.
        needs_critic: whether it reads ``AdvantageInputs.values`` and gives ``Advantages.returns``.
        needs_greedy: whether it reads ``AdvantageInputs.baselines``.
        supports_dynamic_sampling: whether a group without a learning signal has only zero advantages when it is
            estimated alone. ``dynamic_sampling`` needs that.
        uses: names of the settings that it reads, those of `AdvantageConfig`. Others are refused with it.
        unused_setting_hints: for settings that it does not read, what to do in place of setting them, as a sentence.
    """

    estimate: Estimator
    min_attempts: int = 1
    needs_critic: bool = False
    needs_greedy: bool = False
    supports_dynamic_sampling: bool = False
    uses: tuple[str, ...] = ()
    unused_setting_hints: Mapping[str, str] = field(default_factory=dict)

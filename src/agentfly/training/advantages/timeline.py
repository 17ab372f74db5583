"""Timeline: the sampled tokens of a trajectory one after another, whichever rows hold them.

A trajectory is one sequence of choices, and rows are where its tokens happen to lie. Estimators that look from one
token to the next go along the timeline: a row goes on where the one before it, in the order of turns, has ended, and
what was read in between (prompts, observations, placeholders of images) is no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.advantages.algorithm import Evidence, Floats
from agentfly.training.advantages.attempts import Attempt, attempts_by_group
from agentfly.training.rows import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Timeline:
    """The order in which a trajectory's N tokens were sampled.

    Attributes:
        attempt: the trajectory.
        group_id: its group.
        order: places of the tokens, in time, in its rows laid end to end; [N].
    """

    attempt: Attempt
    group_id: str
    order: NDArray[np.intp]

    def gather(self, arrays: Sequence[Floats]) -> Floats:
        """What arrays of the batch's rows say of the trajectory's tokens, in time; [N]."""
        import numpy as np

        return np.concatenate([arrays[number] for number in self.attempt.rows])[self.order]


def timelines(evidence: Evidence) -> list[Timeline]:
    """The timeline of each trajectory with a sampled token."""
    import numpy as np

    made = []
    for group_id, attempts in attempts_by_group(evidence).items():
        for attempt in attempts:
            turns = np.concatenate([turn_indices(evidence.rows[number]) for number in attempt.rows])
            made.append(Timeline(attempt, group_id, np.argsort(turns, kind="stable")))
    return made


def turn_indices(row: Row) -> NDArray[np.int64]:
    """For each sampled token of a row, the number of its turn in the trajectory; 0 where the row knows no turns."""
    import numpy as np

    indices = np.array([turn.index for turn in row.turns] or [0], dtype=np.int64)
    return indices[turn_places(row)]


def turn_places(row: Row) -> NDArray[np.intp]:
    """For each sampled token of a row, the place of its turn in ``row.turns``; 0 where the row knows no turns."""
    import numpy as np

    starts = np.array([turn.start for turn in row.turns[1:]], dtype=np.int64)
    return np.searchsorted(starts, row.targets, side="right")


def along_time(evidence: Evidence, judge: Callable[[Timeline, Floats], Floats]) -> list[Floats]:
    """What ``judge`` makes of each trajectory's timeline and of its tokens' rewards in time, laid back into rows.

    A token's reward is what it earned by itself, and at the last token the trajectory's reward besides.
    """
    import numpy as np

    rows = evidence.rows
    nothing = [np.zeros(len(row.targets)) for row in rows]
    own = evidence.token_rewards or nothing
    judged = list(nothing)
    for timeline in timelines(evidence):
        numbers = timeline.attempt.rows
        rewards = timeline.gather(own)
        rewards[-1] += rows[numbers[0]].reward
        values = np.empty(len(rewards))
        values[timeline.order] = judge(timeline, rewards)
        ends = np.cumsum([len(rows[number].targets) for number in numbers])
        for number, part in zip(numbers, np.split(values, ends[:-1]), strict=True):
            judged[number] = part
    return judged


def returns_along(rewards: Floats, discount: float) -> Floats:
    """At each token, its reward and the discounted rewards of those after it; [N]."""
    import numpy as np

    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns, coming = [], 0.0
    for reward in rewards[::-1].tolist():
        coming = reward + discount * coming
        returns.append(coming)
    return np.array(returns[::-1])

"""Timeline: the sampled tokens of a trajectory in the order in which they led to one another, whichever rows hold them.

A trajectory is a sequence of choices, and rows are where its tokens happen to lie. Estimators that look from one token
to the next go along the timeline: within a turn to the turn's next token, and from a turn's last token to the first of
the turn that follows it. What was read in between (prompts, observations, placeholders of images) is no step.

Where a program has gone on from one answer in several ways, or parallel subagents have worked on one turn's calls,
several turns follow one. What comes after that one is then the mean over them: what is to be expected, and the same as
if each way had been a trajectory of its own. Each way ends with the trajectory's reward. Where parallel subagents have
come back, one turn follows several, and each of them goes on in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.training.advantages.algorithm import Evidence, Floats
from agentfly.training.advantages.attempts import Attempt, attempts_by_group
from agentfly.training.rows import Row
from agentfly.training.turn_order import followed_among, followers_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Stretch:
    """The tokens of one turn on a timeline.

    Attributes:
        start, stop: the tokens, as places on the timeline.
        followers: the stretches that come next, as places in `Timeline.stretches`, all of them later ones.
    """

    start: int
    stop: int
    followers: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """The order in which a trajectory's N tokens were sampled.

    Attributes:
        attempt: the trajectory.
        group_id: its group.
        order: places of the tokens, by turns, in its rows laid end to end; [N].
        stretches: its turns, in the order in which they ended.
    """

    attempt: Attempt
    group_id: str
    order: NDArray[np.intp]
    stretches: tuple[Stretch, ...]

    @property
    def ends(self) -> list[int]:
        """The tokens after which nothing comes, as places on the timeline."""
        return [stretch.stop - 1 for stretch in self.stretches if not stretch.followers]

    def gather(self, arrays: Sequence[Floats]) -> Floats:
        """What arrays of the batch's rows say of the trajectory's tokens, along the timeline; [N]."""
        import numpy as np

        return np.concatenate([arrays[number] for number in self.attempt.rows])[self.order]

    def next_values(self, values: Floats) -> Floats:
        """For each token the value of the one after it: the mean over several, and 0 where nothing comes; [N]."""
        import numpy as np

        after = np.append(values[1:], 0.0)
        for stretch in self.stretches:
            after[stretch.stop - 1] = self._mean_of_first(values, stretch)
        return after

    def returns(self, rewards: Floats, discount: float) -> Floats:
        """At each token, its reward and the discounted rewards of those after it; [N]."""
        import numpy as np

        returns = np.empty(len(rewards))
        for stretch in reversed(self.stretches):
            coming = self._mean_of_first(returns, stretch)
            returns[stretch.start : stretch.stop] = _returns_along(
                rewards[stretch.start : stretch.stop], discount, coming
            )
        return returns

    def _mean_of_first(self, values: Floats, stretch: Stretch) -> float:
        """The mean of a value over the first tokens of the turns that follow one; 0 where none does."""
        first = [float(values[self.stretches[follower].start]) for follower in stretch.followers]
        return sum(first) / len(first) if first else 0.0


def timelines(evidence: Evidence) -> list[Timeline]:
    """The timeline of each trajectory with a sampled token."""
    return [
        _timeline(attempt, group_id, evidence.rows)
        for group_id, attempts in attempts_by_group(evidence).items()
        for attempt in attempts
    ]


def _timeline(attempt: Attempt, group_id: str, rows: Sequence[Row]) -> Timeline:
    import numpy as np

    parts: list[tuple[int, int, NDArray[np.intp]]] = []  # turn, an order where the turn is not known, tokens
    follows: dict[int, tuple[int, ...] | None] = {}
    laid = 0
    for number in attempt.rows:
        row = rows[number]
        places = turn_places(row)
        for place, turn in enumerate(row.turns):
            follows[turn.index] = turn.follows
            if (tokens := np.flatnonzero(places == place)).size:
                parts.append((turn.index, 0, laid + tokens))
        if not row.turns:
            parts.append((0, len(parts), np.arange(laid, laid + len(row.targets))))
        laid += len(row.targets)
    parts.sort(key=lambda part: part[:2])
    followers = _followers([turn for turn, _, _ in parts], follows)
    stops = np.cumsum([len(tokens) for _, _, tokens in parts]).tolist()
    stretches = tuple(map(Stretch, [0, *stops[:-1]], stops, followers))
    return Timeline(attempt, group_id, np.concatenate([tokens for _, _, tokens in parts]), stretches)


def _followers(turns: Sequence[int], follows: Mapping[int, tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    """For each of the turns, in order, the places of those that follow it. Without more knowledge it is the next."""
    if len(set(turns)) < len(turns) or all(follows.get(turn) is None for turn in turns):
        return [(place + 1,) for place in range(len(turns) - 1)] + [()]
    places = {turn: place for place, turn in enumerate(turns)}
    following = followers_of(followed_among(follows, places))
    return [tuple(places[follower] for follower in following[turn]) for turn in turns]


def turn_places(row: Row) -> NDArray[np.intp]:
    """For each sampled token of a row, the place of its turn in ``row.turns``; 0 where the row knows no turns."""
    import numpy as np

    starts = np.array([turn.start for turn in row.turns[1:]], dtype=np.int64)
    return np.searchsorted(starts, row.targets, side="right")


def along_time(evidence: Evidence, judge: Callable[[Timeline, Floats], Floats]) -> list[Floats]:
    """What ``judge`` makes of each trajectory's timeline and of its tokens' rewards along it, laid back into rows.

    A token's reward is what it earned by itself, and after the last one of each way the trajectory's reward besides.
    """
    import numpy as np

    rows = evidence.rows
    nothing = [np.zeros(len(row.targets)) for row in rows]
    own = evidence.token_rewards or nothing
    judged = list(nothing)
    for timeline in timelines(evidence):
        numbers = timeline.attempt.rows
        rewards = timeline.gather(own)
        rewards[timeline.ends] += rows[numbers[0]].reward
        values = np.empty(len(rewards))
        values[timeline.order] = judge(timeline, rewards)
        ends = np.cumsum([len(rows[number].targets) for number in numbers])
        for number, part in zip(numbers, np.split(values, ends[:-1]), strict=True):
            judged[number] = part
    return judged


def _returns_along(rewards: Floats, discount: float, coming: float) -> Floats:
    """At each token of one turn, its reward and the discounted rewards of those after it; ``coming`` is behind it."""
    import numpy as np

    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1] + coming
    returns = []
    for reward in rewards[::-1].tolist():
        coming = reward + discount * coming
        returns.append(coming)
    return np.array(returns[::-1])

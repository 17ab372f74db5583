"""Timeline: the sampled tokens of a trajectory in the order in which they led to one another, whichever rows hold them.

A trajectory is a sequence of choices, and rows are where its tokens happen to lie. Estimators that look from one token
to the next go along the timeline: within a turn to the turn's next token, and from a turn's last token to the first of
the turn that follows it. What was read in between (prompts, observations, placeholders of images) is no step.

Where a program has gone on from one answer in several ways, or parallel subagents have worked on one turn's calls,
several turns follow one. What comes after that one is then the mean over them: what is to be expected, and the same as
if each way had been a trajectory of its own. Each way ends with the trajectory's reward. Where parallel subagents have
come back, one turn follows several, and each of them goes on in it.

Estimators that look at what comes after each token: REINFORCE++, ReMax and GAE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.core.errors import UsageError
from agentfly.training.advantages.algorithm import AdvantageInputs, Advantages, Floats
from agentfly.training.advantages.numerics import subtract_with_tolerance, whiten
from agentfly.training.advantages.outcome import DR_GRPO, Attempt, attempts_by_group
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, predecessors_within, successors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TurnSpan:
    """The tokens of one turn on a timeline.

    Attributes:
        start, stop: the tokens, as places on the timeline.
        followers: the stretches that come next, as places in `TokenTimeline.stretches`, all of them later ones.
    """

    start: int
    stop: int
    followers: tuple[int, ...]


@dataclass(frozen=True)
class TokenTimeline:
    """The order in which a trajectory's N tokens were sampled.

    Attributes:
        attempt: the trajectory.
        group_id: its group.
        order: places of the tokens, by turns, in its rows laid end to end; [N].
        spans: its turns, in the order in which they ended.
    """

    attempt: Attempt
    group_id: str
    order: NDArray[np.intp]
    spans: tuple[TurnSpan, ...]

    @property
    def ends(self) -> list[int]:
        """The tokens after which nothing comes, as places on the timeline."""
        return [stretch.stop - 1 for stretch in self.spans if not stretch.followers]

    def gather(self, arrays: Sequence[Floats]) -> Floats:
        """What arrays of the batch's rows say of the trajectory's tokens, along the timeline; [N]."""
        import numpy as np

        return np.concatenate([arrays[number] for number in self.attempt.rows])[self.order]

    def next_values(self, values: Floats) -> Floats:
        """For each token the value of the one after it: the mean over several, and 0 where nothing comes; [N]."""
        import numpy as np

        after = np.append(values[1:], 0.0)
        for stretch in self.spans:
            after[stretch.stop - 1] = self._mean_of_first(values, stretch)
        return after

    def returns(self, rewards: Floats, discount: float) -> Floats:
        """At each token, its reward and the discounted rewards of those after it; [N]."""
        import numpy as np

        returns = np.empty(len(rewards))
        for stretch in reversed(self.spans):
            coming = self._mean_of_first(returns, stretch)
            returns[stretch.start : stretch.stop] = _discounted_returns(
                rewards[stretch.start : stretch.stop], discount, coming
            )
        return returns

    def _mean_of_first(self, values: Floats, stretch: TurnSpan) -> float:
        """The mean of a value over the first tokens of the turns that follow one; 0 where none does."""
        first = [float(values[self.spans[follower].start]) for follower in stretch.followers]
        return sum(first) / len(first) if first else 0.0


def timelines(evidence: AdvantageInputs) -> list[TokenTimeline]:
    """The timeline of each trajectory with a sampled token."""
    return [
        _timeline(attempt, group_id, evidence.rows)
        for group_id, attempts in attempts_by_group(evidence).items()
        for attempt in attempts
    ]


def _timeline(attempt: Attempt, group_id: str, rows: Sequence[Row]) -> TokenTimeline:
    import numpy as np

    parts: list[tuple[int, int, NDArray[np.intp]]] = []  # turn, an order where the turn is not known, tokens
    follows: dict[int, tuple[int, ...] | None] = {}
    laid = 0
    for number in attempt.rows:
        row = rows[number]
        places = turn_index_per_token(row)
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
    stretches = tuple(map(TurnSpan, [0, *stops[:-1]], stops, followers))
    return TokenTimeline(attempt, group_id, np.concatenate([tokens for _, _, tokens in parts]), stretches)


def _followers(turns: Sequence[int], follows: Mapping[int, tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    """For each of the turns, in order, the places of those that follow it. Without more knowledge it is the next."""
    if len(set(turns)) < len(turns) or all(follows.get(turn) is None for turn in turns):
        return [(place + 1,) for place in range(len(turns) - 1)] + [()]
    places = {turn: place for place, turn in enumerate(turns)}
    following = successors(predecessors_within(follows, places))
    return [tuple(places[follower] for follower in following[turn]) for turn in turns]


def turn_index_per_token(row: Row) -> NDArray[np.intp]:
    """For each sampled token of a row, the place of its turn in ``row.turns``; 0 where the row knows no turns."""
    import numpy as np

    starts = np.array([turn.start for turn in row.turns[1:]], dtype=np.int64)
    return np.searchsorted(starts, row.targets, side="right")


def estimate_along_timeline(
    evidence: AdvantageInputs, judge: Callable[[TokenTimeline, Floats], Floats]
) -> list[Floats]:
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


def _discounted_returns(rewards: Floats, discount: float, coming: float) -> Floats:
    """At each token of one turn, its reward and the discounted rewards of those after it; ``coming`` is behind it."""
    import numpy as np

    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1] + coming
    returns = []
    for reward in rewards[::-1].tolist():
        coming = reward + discount * coming
        returns.append(coming)
    return np.array(returns[::-1])


def reinforce_plus_plus(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """The discounted return from each token on, whitened over the batch's tokens.

    With the KL penalty among the tokens' rewards, as in the paper, a token's return is the trajectory's reward less the
    penalties from the token on. Groups do not count.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262; as verl 0.9's ``reinforce_plus_plus``.
    """
    returns = estimate_along_timeline(evidence, lambda timeline, rewards: timeline.returns(rewards, config.discount))
    return Advantages(whiten(returns))


def reinforce_plus_plus_baseline(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """The reward less the group's mean, the same at all tokens of a trajectory, whitened over the batch's tokens.

    A group of one gives 0 before whitening, where verl 0.9's ``reinforce_plus_plus_baseline`` gives the reward itself.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, the variant with a baseline.
    """
    return Advantages(whiten(DR_GRPO(evidence, config).values))


def remax(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """The return from each token on, not discounted, less the reward of the greedy rollout of the same task.

    Source: ReMax, https://arxiv.org/abs/2310.10505; as verl 0.9's ``remax``.

    Raises:
        UsageError: the reward of the greedy rollout of a group is not among the evidence.
    """

    def judge(timeline: TokenTimeline, rewards: Floats) -> Floats:
        baselines = evidence.baselines or {}
        if timeline.group_id not in baselines:
            raise UsageError(
                f"remax needs the reward of a greedy rollout of each task, and there is none of group "
                f"{timeline.group_id!r}. Leave out the rows of groups without one."
            )
        return subtract_with_tolerance(timeline.returns(rewards, 1.0), baselines[timeline.group_id])

    return Advantages(estimate_along_timeline(evidence, judge))


def gae(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
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

    def judge(timeline: TokenTimeline, rewards: Floats) -> Floats:
        expected = timeline.gather(values)
        surprises = rewards + config.discount * timeline.next_values(expected) - expected
        return timeline.returns(surprises, config.discount * config.gae_lambda)

    advantages = estimate_along_timeline(evidence, judge)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    surprising = [subtract_with_tolerance(coming, value) for coming, value in zip(returns, values, strict=True)]
    return Advantages(whiten(surprising), returns)

"""Token-level estimators along the timeline of a trajectory: REINFORCE++, ReMax and GAE.

A timeline orders a trajectory's sampled tokens by the turns that led to one another. Returns are computed along it, not
along rows: within a turn from token to token, and from a turn's last token to the first token of the next turn.
Prompts, observations and image placeholders in between are not steps.

Several turns can follow one turn, in branches or parallel subagents. The value after that turn is then the mean over
the branches, as if each branch were a separate trajectory. Each branch ends with the trajectory's reward. After
parallel subagents, one turn follows several, and each of them continues in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentfly.core.errors import UsageError
from agentfly.training.advantages.algorithm import AdvantageInputs, Advantages, Floats, subtract_with_tolerance, whiten
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
        start, stop: range of the tokens on the timeline.
        followers: indices of the next spans in `TokenTimeline.spans`; all are later ones.
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
        order: index of each token in the concatenation of the trajectory's rows; [N].
        spans: the turns, in the order in which they ended.
    """

    attempt: Attempt
    group_id: str
    order: NDArray[np.intp]
    spans: tuple[TurnSpan, ...]

    @property
    def ends(self) -> list[int]:
        """The timeline indices of tokens without a successor."""
        return [span.stop - 1 for span in self.spans if not span.followers]

    def gather(self, arrays: Sequence[Floats]) -> Floats:
        """Return the trajectory's values from arrays of the batch's rows, in timeline order; [N]."""
        import numpy as np

        return np.concatenate([arrays[number] for number in self.attempt.rows])[self.order]

    def next_values(self, values: Floats) -> Floats:
        """Return for each token the value of its successor: the mean over several, 0 without one; [N]."""
        import numpy as np

        after = np.append(values[1:], 0.0)
        for span in self.spans:
            after[span.stop - 1] = self._mean_of_first(values, span)
        return after

    def returns(self, rewards: Floats, discount: float) -> Floats:
        """Return for each token its reward plus the discounted rewards of later tokens; [N]."""
        import numpy as np

        returns = np.empty(len(rewards))
        for span in reversed(self.spans):
            after = self._mean_of_first(returns, span)
            returns[span.start : span.stop] = _discounted_returns(rewards[span.start : span.stop], discount, after)
        return returns

    def _mean_of_first(self, values: Floats, span: TurnSpan) -> float:
        """Return the mean value over the first tokens of the turns that follow one; 0 if there are none."""
        first = [float(values[self.spans[follower].start]) for follower in span.followers]
        return sum(first) / len(first) if first else 0.0


def timelines(evidence: AdvantageInputs) -> list[TokenTimeline]:
    """Return the timeline of each trajectory with a sampled token."""
    return [
        _timeline(attempt, group_id, evidence.rows)
        for group_id, attempts in attempts_by_group(evidence).items()
        for attempt in attempts
    ]


def _timeline(attempt: Attempt, group_id: str, rows: Sequence[Row]) -> TokenTimeline:
    import numpy as np

    parts: list[tuple[int, int, NDArray[np.intp]]] = []  # turn, an order where the turn is not known, tokens
    parent_turns: dict[int, tuple[int, ...] | None] = {}
    offset = 0
    for number in attempt.rows:
        row = rows[number]
        turn_indices = turn_index_per_token(row)
        for index, turn in enumerate(row.turns):
            parent_turns[turn.index] = turn.parent_turns
            if (tokens := np.flatnonzero(turn_indices == index)).size:
                parts.append((turn.index, 0, offset + tokens))
        if not row.turns:
            parts.append((0, len(parts), np.arange(offset, offset + len(row.targets))))
        offset += len(row.targets)
    parts.sort(key=lambda part: part[:2])
    followers = _followers([turn for turn, _, _ in parts], parent_turns)
    stops = np.cumsum([len(tokens) for _, _, tokens in parts]).tolist()
    spans = tuple(map(TurnSpan, [0, *stops[:-1]], stops, followers))
    return TokenTimeline(attempt, group_id, np.concatenate([tokens for _, _, tokens in parts]), spans)


def _followers(turns: Sequence[int], parent_turns: Mapping[int, tuple[int, ...] | None]) -> list[tuple[int, ...]]:
    """Return for each turn the indices of the turns that follow it; by default the next one."""
    if len(set(turns)) < len(turns) or all(parent_turns.get(turn) is None for turn in turns):
        return [(index + 1,) for index in range(len(turns) - 1)] + [()]
    indices = {turn: index for index, turn in enumerate(turns)}
    following = successors(predecessors_within(parent_turns, indices))
    return [tuple(indices[follower] for follower in following[turn]) for turn in turns]


def turn_index_per_token(row: Row) -> NDArray[np.intp]:
    """Return for each sampled token of a row the index of its turn in ``row.turns``; 0 if the row has no turns."""
    import numpy as np

    starts = np.array([turn.start for turn in row.turns[1:]], dtype=np.int64)
    return np.searchsorted(starts, row.targets, side="right")


def estimate_along_timeline(
    evidence: AdvantageInputs, judge: Callable[[TokenTimeline, Floats], Floats]
) -> list[Floats]:
    """Apply ``judge`` to each trajectory's timeline and its token rewards, and return the result per row.

    The last token of each branch also has the trajectory's reward.
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


def _discounted_returns(rewards: Floats, discount: float, after: float) -> Floats:
    """Return for each token of one turn its reward plus the discounted later ones; ``after`` is the next return."""
    import numpy as np

    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1] + after
    returns = []
    for reward in rewards[::-1].tolist():
        after = reward + discount * after
        returns.append(after)
    return np.array(returns[::-1])


def reinforce_plus_plus(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return the discounted return of each token, whitened over the batch's tokens. Groups do not matter.

    With the KL penalty in the token rewards, as in the paper, a token's return is the trajectory's reward minus the
    penalties from that token on.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262; as verl 0.9's ``reinforce_plus_plus``.
    """
    returns = estimate_along_timeline(evidence, lambda timeline, rewards: timeline.returns(rewards, config.discount))
    return Advantages(whiten(returns))


def reinforce_plus_plus_baseline(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return the reward minus the group's mean, broadcast to the trajectory's tokens and whitened over the batch's.

    A group of one gives 0 before whitening; verl 0.9's ``reinforce_plus_plus_baseline`` gives the reward itself.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, the variant with a baseline.
    """
    return Advantages(whiten(DR_GRPO(evidence, config).values))


def remax(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Return the undiscounted return of each token minus the reward of the task's greedy rollout.

    Source: ReMax, https://arxiv.org/abs/2310.10505; as verl 0.9's ``remax``.

    Raises:
        UsageError: a group has no baseline.
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
    """Return generalized advantage estimates from the critic's values, whitened over the batch's tokens.

    Only sampled tokens are steps: discount and lambda apply from the last token of a turn to the first of the next. The
    critic's targets (returns) are computed before whitening, as in verl 0.9's ``gae``.
    Source: Generalized Advantage Estimation, https://arxiv.org/abs/1506.02438, equation 16.

    Raises:
        UsageError: the critic's values are missing.
    """
    values = evidence.values
    if values is None:
        raise UsageError("gae needs the critic's value of each sampled token: give the evidence values.")

    def judge(timeline: TokenTimeline, rewards: Floats) -> Floats:
        expected = timeline.gather(values)
        td_errors = rewards + config.discount * timeline.next_values(expected) - expected
        return timeline.returns(td_errors, config.discount * config.gae_lambda)

    advantages = estimate_along_timeline(evidence, judge)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    differences = [subtract_with_tolerance(target, value) for target, value in zip(returns, values, strict=True)]
    return Advantages(whiten(differences), returns)

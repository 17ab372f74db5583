"""Row: one token sequence of a trajectory for training; with the overlong penalty and truncation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from agentfly.core.json_values import Brief
from agentfly.core.messages import PlacedImage
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.rollouts.trajectory_recorder import states_of
from agentfly.training.config.groups import OverlongConfig


def predecessors_within(
    parent_turns: Mapping[int, Sequence[int] | None], kept: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Return for each kept turn its nearest kept predecessors. A turn that is not kept is replaced by its predecessors.

    Args:
        parent_turns: the predecessors of each turn, by turn number; they have lower numbers. None means the turn right
            before. Predecessors that are not among the keys are ignored.
        kept: the numbers of the kept turns.
    """
    found: dict[int, tuple[int, ...]] = {}
    before: int | None = None
    for number in sorted(parent_turns):
        direct = parent_turns[number]
        if direct is None:
            direct = () if before is None else (before,)
        reached = dict.fromkeys(
            kept_one for one in direct for kept_one in ((one,) if one in kept else found.get(one, ()))
        )
        found[number] = tuple(reached)
        before = number
    return {number: found[number] for number in found if number in kept}


def successors(parent_turns: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the inverse mapping: for each turn, the turns that follow it."""
    followers: dict[int, list[int]] = {number: [] for number in parent_turns}
    for number, before in parent_turns.items():
        for one in before:
            followers[one].append(number)
    return followers


@dataclass(frozen=True, slots=True)
class RowTurn:
    """One turn of a row, with what training needs.

    Attributes:
        index: number of the turn in its trajectory.
        start, stop: range of its sampled tokens in the row's ids.
        reward: reward of the turn itself (the step reward); None if there is none.
        anchor: identifies the state in which the turn was taken; empty if unknown.
        kind: ``act``, or ``memory`` for a turn that only writes memory.
        state: the text of the state.
        parent_turns: numbers of the turns in the trajectory's rows that led directly to this one; None for the turn
            before it. See `agentfly.core.trajectory.Turn.parent_turns`.
    """

    index: int
    start: int
    stop: int
    reward: float | None = None
    anchor: str = ""
    kind: Literal["act", "memory"] = "act"
    state: str = ""
    parent_turns: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class Row(Brief):
    """One token sequence of a trajectory that is trained on, with the trajectory's reward.

    A conversation under the strategy ``chain`` gives one row, and one more for each break: where memory has folded the
    past, or the chat format has rewritten it. Under ``step`` each turn gives one. Conversations of subagents give their
    own rows. Statistics of a group are computed over its trajectories (by ``rollout_id``), so a trajectory with several
    rows counts once.

    Attributes:
        ids: token ids, length T.
        loss_mask: 1 exactly on the tokens that the policy sampled, length T.
        logprobs: rollout log-probs, under which the tokens were sampled; NaN where the mask is 0; length T.
        versions: version of the policy's weights that sampled each token; length T.
        group_id: the group of attempts at one task, whose rewards make the baseline.
        rollout_id: the trajectory.
        reward: the trajectory's reward.
        truncated: whether tokens were cut off the end.
        raw_logprobs: the log-probs at temperature 1 and without cuts, NaN where they are unknown; length T.
        turns: the turns whose sampled tokens the row holds, in order: one under ``step``, all of a conversation (or
            of a part of one) under ``chain``.
        agent: path of the subagent; empty for the main agent.
        images: the images whose placeholders are among the ids.
    """

    ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    group_id: str
    rollout_id: str
    reward: float
    truncated: bool
    raw_logprobs: Sequence[float] | None = None
    turns: tuple[RowTurn, ...] = ()
    agent: str = ""
    images: Sequence[PlacedImage] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if self.raw_logprobs is not None:
            lengths.add(len(self.raw_logprobs))
        if len(lengths) != 1:
            raise ValueError(f"Ids, mask, log-probs and versions of a row have different lengths: {sorted(lengths)}.")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def targets(self) -> list[int]:
        """Positions of the sampled tokens, in order."""
        return [position for position, sampled in enumerate(self.loss_mask) if sampled]

    @property
    def target_logprobs(self) -> list[float]:
        """Behaviour log-probs of the sampled tokens, in order."""
        return [self.logprobs[position] for position in self.targets]

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that sampled a token of the row."""
        return min(self.versions[position] for position in self.targets)


@dataclass(frozen=True, repr=False)
class RowBatch(Brief):
    """The rows of a batch of trajectories, and the numbers of excluded trajectories.

    Attributes:
        rows: the rows; rows of one group are consecutive.
        excluded: number of trajectories without a row, by cause: ``unscored``, ``infrastructure``, ``no_tokens`` (the
            tokens of a turn are unknown), ``untrainable`` (see `Trajectory.untrainable_reason`), ``no_sampled_tokens``,
            ``no_logprobs``.
    """

    rows: tuple[Row, ...]
    excluded: Mapping[str, int]


def rows_from_trajectories(trajectories: Iterable[Trajectory]) -> RowBatch:
    """Return one row for each token sequence with a sampled token, of all trainable trajectories.

    A trajectory is excluded and counted if infrastructure failed, its reward is not finite, or sampled tokens or
    log-probs are missing. It then affects neither a baseline nor the loss. Sequences that subagents sampled from
    another model give no rows either.
    """
    groups: dict[str, list[Row]] = {}
    excluded: Counter[str] = Counter()
    for trajectory in trajectories:
        cause = exclusion_cause(trajectory)
        if cause is not None:
            excluded[cause] += 1
        else:
            groups.setdefault(trajectory.group_id, []).extend(rows_of(trajectory))
    return RowBatch(rows=tuple(row for rows in groups.values() for row in rows), excluded=dict(excluded))


def exclusion_cause(trajectory: Trajectory) -> str | None:
    """Return why a trajectory cannot be trained on, or None if it can."""
    if trajectory.infrastructure_failed:
        return "infrastructure"
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return "unscored"
    if not trajectory.has_tokens:
        return "no_tokens"
    if trajectory.untrainable_reason:
        return "untrainable"
    if not trajectory.trainable:
        return "no_sampled_tokens"
    return None if all(map(_logprobs_known, trajectory.own_sequences)) else "no_logprobs"


def _logprobs_known(sequence: TokenSequence) -> bool:
    return all(
        math.isfinite(logprob)
        for logprob, sampled in zip(sequence.logprobs, sequence.loss_mask, strict=True)
        if sampled
    )


def rows_of(trajectory: Trajectory) -> Iterator[Row]:
    """Yield a row for each token sequence of a scored trajectory that its own policy sampled from."""
    others = {turn.sequence for turn in trajectory.turns if turn.other_model}
    own = {
        number: sequence
        for number, sequence in enumerate(trajectory.sequences)
        if sequence.sampled_count and number not in others
    }
    kept = {turn.index for turn in trajectory.turns if turn.sequence in own}
    parent_turns = predecessors_within({turn.index: turn.parent_turns for turn in trajectory.turns}, kept)
    turns: dict[int, list[RowTurn]] = {number: [] for number in own}
    for turn, state in zip(trajectory.turns, states_of(trajectory), strict=True):
        if turn.index in kept:
            turns[turn.sequence].append(_row_turn(turn, state, parent_turns[turn.index]))
    agents = {turn.sequence: turn.agent for turn in reversed(trajectory.turns)}
    for number, sequence in own.items():
        yield _row(trajectory, sequence, turns[number], agents.get(number, ""))


def _row(trajectory: Trajectory, sequence: TokenSequence, turns: Sequence[RowTurn], agent: str) -> Row:
    assert trajectory.reward is not None
    return Row(
        ids=sequence.ids,
        loss_mask=sequence.loss_mask,
        logprobs=sequence.logprobs,
        versions=sequence.versions,
        group_id=trajectory.group_id,
        rollout_id=trajectory.rollout_id,
        reward=trajectory.reward,
        truncated=sequence.truncated,
        raw_logprobs=sequence.raw_logprobs,
        turns=tuple(turns),
        agent=agent,
        images=tuple(sequence.images),
    )


def _row_turn(turn: Turn, state: str, parent_turns: tuple[int, ...]) -> RowTurn:
    return RowTurn(turn.index, turn.start, turn.stop, turn.reward, turn.anchor, turn.kind, state, parent_turns)


def apply_row_limits(batch: RowBatch, *, overlong: OverlongConfig | None, max_row_tokens: int | None) -> RowBatch:
    """Apply the overlong penalty and then truncate the rows; None skips either.

    The penalty counts all sampled tokens, so it is computed before truncation.
    """
    if overlong is not None:
        batch = apply_overlong_penalty(batch, overlong)
    if max_row_tokens is not None:
        batch = cut_rows(batch, max_row_tokens)
    return batch


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """Return the penalty on the reward of a trajectory with ``tokens`` sampled tokens.

    It is 0 up to ``max_tokens - buffer_tokens``, rises linearly, and is ``penalty`` from ``max_tokens`` on.
    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """
    beyond = tokens - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(max(beyond / config.buffer_tokens, 0.0), 1.0)


def apply_overlong_penalty(batch: RowBatch, config: OverlongConfig) -> RowBatch:
    """Return the batch with `overlong_penalty` subtracted from each trajectory's reward.

    The tokens of all rows of a trajectory count together, including those of memory and subagents.
    """
    tokens: Counter[str] = Counter()
    for row in batch.rows:
        tokens[row.rollout_id] += len(row.targets)
    penalties = {rollout_id: overlong_penalty(count, config) for rollout_id, count in tokens.items()}
    rows = tuple(
        replace(row, reward=row.reward - penalties[row.rollout_id]) if penalties[row.rollout_id] else row
        for row in batch.rows
    )
    return replace(batch, rows=rows)


def cut_rows(batch: RowBatch, max_tokens: int) -> RowBatch:
    """Return the batch with rows of at most ``max_tokens`` tokens.

    A row without sampled tokens after truncation is removed. A trajectory without rows is counted as excluded with the
    cause ``cut_off``, and affects no baseline.
    """
    rows = _without_empty([cut_row(row, max_tokens) for row in batch.rows])
    gone = {row.rollout_id for row in batch.rows} - {row.rollout_id for row in rows}
    return RowBatch(rows, {**batch.excluded, "cut_off": len(gone)} if gone else batch.excluded)


def _without_empty(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with sampled tokens. Predecessors in removed rows are replaced by their own predecessors."""
    emptied = {row.rollout_id for row in rows if not row.targets and row.turns}
    parent_turns: dict[str, dict[int, tuple[int, ...] | None]] = {rollout_id: {} for rollout_id in emptied}
    kept: dict[str, set[int]] = {rollout_id: set() for rollout_id in emptied}
    for row in rows:
        if row.rollout_id in emptied:
            parent_turns[row.rollout_id].update({turn.index: turn.parent_turns for turn in row.turns})
            if row.targets:
                kept[row.rollout_id].update(turn.index for turn in row.turns)
    found = {rollout_id: predecessors_within(parent_turns[rollout_id], kept[rollout_id]) for rollout_id in emptied}
    return tuple(
        replace(row, turns=tuple(replace(turn, parent_turns=found[row.rollout_id][turn.index]) for turn in row.turns))
        if row.rollout_id in emptied
        else row
        for row in rows
        if row.targets
    )


def cut_row(row: Row, max_tokens: int) -> Row:
    """Truncate a row to ``max_tokens`` tokens and mark it; a short enough row is returned unchanged.

    An image across the cut is removed entirely. Turns behind the cut remain without tokens, because their rewards
    still count for earlier turns.
    """
    if len(row) <= max_tokens:
        return row
    stop = min([max_tokens, *(image.start for image in row.images if image.start < max_tokens < image.stop)])
    return replace(
        row,
        ids=row.ids[:stop],
        loss_mask=row.loss_mask[:stop],
        logprobs=row.logprobs[:stop],
        versions=row.versions[:stop],
        raw_logprobs=None if row.raw_logprobs is None else row.raw_logprobs[:stop],
        turns=tuple(_cut_turn(turn, stop) for turn in row.turns),
        images=tuple(image for image in row.images if image.stop <= stop),
        truncated=True,
    )


def _cut_turn(turn: RowTurn, stop: int) -> RowTurn:
    return replace(turn, start=min(turn.start, stop), stop=min(turn.stop, stop))

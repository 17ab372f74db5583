"""What is done about rows and trajectories that are too long: a penalty on the reward, and a cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agentfly.training.config.sampling_config import OverlongConfig
from agentfly.training.rows import Row, RowBatch, RowTurn
from agentfly.training.turn_order import followed_among


def within_limits(batch: RowBatch, *, overlong: OverlongConfig | None, max_row_tokens: int | None) -> RowBatch:
    """A batch with rewards less the penalty on length, and with rows cut; None leaves out either.

    The penalty is for what was sampled, so it is found before rows are cut.
    """
    if overlong is not None:
        batch = less_overlong_penalty(batch, overlong)
    if max_row_tokens is not None:
        batch = cut_rows(batch, max_row_tokens)
    return batch


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """What a trajectory of so many sampled tokens loses of its reward.

    Nothing up to ``max_tokens - buffer_tokens``, ``penalty`` from ``max_tokens`` on, and evenly more in between.
    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13.
    """
    beyond = tokens - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(max(beyond / config.buffer_tokens, 0.0), 1.0)


def less_overlong_penalty(batch: RowBatch, config: OverlongConfig) -> RowBatch:
    """The batch with each trajectory's reward less its `overlong_penalty`.

    The tokens of all rows of a trajectory count together, those of its memory and its subagents included.
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
    """The batch with rows of at most so many tokens.

    A row that has lost all its sampled tokens is left out. A trajectory of which no row is left counts as left out for
    the cause ``cut_off``, and is in no baseline.
    """
    rows = _without_empty([cut_row(row, max_tokens) for row in batch.rows])
    gone = {row.rollout_id for row in batch.rows} - {row.rollout_id for row in rows}
    return RowBatch(rows, {**batch.left_out, "cut_off": len(gone)} if gone else batch.left_out)


def _without_empty(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with sampled tokens. Turns that followed one of another row follow those before it."""
    emptied = {row.rollout_id for row in rows if not row.targets and row.turns}
    follows: dict[str, dict[int, tuple[int, ...] | None]] = {rollout_id: {} for rollout_id in emptied}
    kept: dict[str, set[int]] = {rollout_id: set() for rollout_id in emptied}
    for row in rows:
        if row.rollout_id in emptied:
            follows[row.rollout_id].update({turn.index: turn.follows for turn in row.turns})
            if row.targets:
                kept[row.rollout_id].update(turn.index for turn in row.turns)
    found = {rollout_id: followed_among(follows[rollout_id], kept[rollout_id]) for rollout_id in emptied}
    return tuple(
        replace(row, turns=tuple(replace(turn, follows=found[row.rollout_id][turn.index]) for turn in row.turns))
        if row.rollout_id in emptied
        else row
        for row in rows
        if row.targets
    )


def cut_row(row: Row, max_tokens: int) -> Row:
    """A row cut at one index, with all that is known of its tokens, and flagged as truncated; itself if short enough.

    An image that the cut would part is left out whole. Turns behind the cut stay, without tokens: what they earned
    still counts for those before them.
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

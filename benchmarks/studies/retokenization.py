"""Re-tokenization: the rows of a system that keeps text, not ids, between sampling and training.

This is an experiment. It introduces a fault that the package avoids, so that ``python -m benchmarks.studies
retokenization`` can measure it. Run as a program, it is ``agentfly`` with this fault.

Such a system keeps a conversation as messages. For training it renders them with the chat template, encodes the whole
text at once, and finds the assistant's turns by their character positions. Here the text of a row is decoded from its
ids. A template that repeats turns unchanged renders the same text. The log-probs change as follows:

* A token that equals the sampled token at the same position keeps its rollout log-prob.
* Any other token was not sampled and has no rollout log-prob. It gets the log-prob under the weights before the update
  (`with_own_logprobs`), like a trainer that computes old log-probs itself. Its probability ratio is 1.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentfly.cli.main import main
from agentfly.core.errors import ConfigError
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.training import trainer
from agentfly.training.batch_source import StepBatch
from agentfly.training.rows import Row, RowBatch, RowTurn
from agentfly.training.update import PolicyUpdater

TEMPERATURE = 1.0
"""The sampling temperature of the study's agent."""


@dataclass(frozen=True)
class RetokenizedRows:
    """Rows whose text was encoded again.

    Attributes:
        rows: the rows, in their order. The log-prob of a token that was not sampled is NaN.
        changed_rows: number of rows whose ids or mask changed.
        sampled_tokens: number of sampled tokens.
        lost_tokens: number of sampled tokens that other tokens replaced, so that they are not trained.
        foreign_tokens: number of trained tokens that were not sampled.
    """

    rows: tuple[Row, ...]
    changed_rows: int
    sampled_tokens: int
    lost_tokens: int
    foreign_tokens: int

    @property
    def metrics(self) -> dict[str, float]:
        """The changes as metrics of a training step."""
        sampled = max(self.sampled_tokens, 1)
        return {
            "retokenization/changed_rows_fraction": self.changed_rows / max(len(self.rows), 1),
            "retokenization/lost_tokens_fraction": self.lost_tokens / sampled,
            "retokenization/foreign_tokens_fraction": self.foreign_tokens / sampled,
        }


def retokenize(rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast) -> RetokenizedRows:
    """Return the rows with the ids of their re-encoded text. A row without any remaining sampled text keeps its ids.

    Raises:
        ConfigError: a row has images, whose placeholders cannot be found in text.
    """
    again = [_encoded_again(row, tokenizer) for row in rows]
    pairs = list(zip(rows, again, strict=True))
    foreign = [sum(map(math.isnan, row.target_logprobs)) for row in again]
    kept = [len(row.targets) - nobodys for row, nobodys in zip(again, foreign, strict=True)]
    sampled = sum(len(row.targets) for row in rows)
    return RetokenizedRows(
        rows=tuple(again),
        changed_rows=sum(
            list(new.ids) != list(old.ids) or list(new.loss_mask) != list(old.loss_mask) for old, new in pairs
        ),
        sampled_tokens=sampled,
        lost_tokens=sampled - sum(kept),
        foreign_tokens=sum(foreign),
    )


def with_own_logprobs(rows: Sequence[Row], model: PreTrainedModel, temperature: float) -> list[Row]:
    """Return the rows with missing rollout log-probs replaced by the log-probs of ``model``."""
    complete = []
    for row in rows:
        if any(map(math.isnan, row.target_logprobs)):
            with torch.no_grad():
                scores = score_tokens(model, [row.ids], [row.targets], temperature=temperature)
            own = dict(zip(row.targets, scores.logprobs.tolist(), strict=True))
            known = [own.get(place, old) if math.isnan(old) else old for place, old in enumerate(row.logprobs)]
            complete.append(replace(row, logprobs=known))
        else:
            complete.append(row)
    return complete


def retokenizing_updater(temperature: float) -> type[PolicyUpdater]:
    """A `PolicyUpdater` that trains on re-tokenized text. Its metrics count the changes.

    Args:
        temperature: sampling temperature of the tokens.
    """

    class RetokenizingUpdater(PolicyUpdater):
        async def update(self, gathered: StepBatch, batch: RowBatch) -> dict[str, float]:
            policy = self.policy
            again = retokenize(batch.rows, policy.tokenizer.hf)
            async with policy.exclusive_access():
                rows = await run_in_thread_to_completion(
                    partial(with_own_logprobs, again.rows, policy.model, temperature)
                )
            return await super().update(gathered, replace(batch, rows=tuple(rows))) | again.metrics

    return RetokenizingUpdater


def _encoded_again(row: Row, tokenizer: PreTrainedTokenizerFast) -> Row:
    if row.images:
        raise ConfigError("A row has images and cannot be re-tokenized: their placeholders cannot be found in text.")
    text, spoken = _spelled(row, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    mask = [int(any(start <= place < stop for start, stop in spoken)) for place, _ in encoded["offset_mapping"]]
    if not any(mask[1:]):
        return row
    logprobs = [math.nan] * len(ids)
    for old, new in _same_places(row, ids, mask):
        logprobs[new] = row.logprobs[old]
    return replace(
        row,
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        versions=[row.oldest_version] * len(ids),
        raw_logprobs=None,
        turns=_turns(row, mask),
    )


def _spelled(row: Row, tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a row, and the character ranges of its sampled parts."""
    text = ""
    spoken = []
    for sampled, part in itertools.groupby(range(len(row)), key=lambda place: row.loss_mask[place]):
        ids = [row.ids[place] for place in part]
        before = len(text)
        text += str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if sampled:
            spoken.append((before, len(text)))
    return text, spoken


def _same_places(row: Row, ids: Sequence[int], mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the positions of trained sampled tokens in the row and in the new ids."""
    matcher = difflib.SequenceMatcher(None, list(row.ids), list(ids), autojunk=False)
    for old, new, length in matcher.get_matching_blocks():
        for offset in range(length):
            if row.loss_mask[old + offset] and mask[new + offset]:
                yield old + offset, new + offset


def _turns(row: Row, mask: Sequence[int]) -> tuple[RowTurn, ...]:
    """Return the row's turns at their new positions; none if they can no longer be separated."""
    parts = [
        [place for place, _ in part]
        for sampled, part in itertools.groupby(enumerate(mask), key=lambda pair: pair[1])
        if sampled
    ]
    if len(parts) != len(row.turns):
        return ()
    return tuple(replace(turn, start=part[0], stop=part[-1] + 1) for turn, part in zip(row.turns, parts, strict=True))


if __name__ == "__main__":  # as `agentfly`, with the updater above
    setattr(trainer, "PolicyUpdater", retokenizing_updater(TEMPERATURE))  # noqa: B010
    main()

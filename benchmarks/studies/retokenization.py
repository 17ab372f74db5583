"""Re-tokenization: rows as a system would have them that keeps text between sampling and training.

An experiment, and nothing else: it does to rows what is a fault everywhere else in this package, so that the fault can
be measured by ``python -m benchmarks.studies retokenization``. As a program it is ``agentfly`` with this fault.

Such a system keeps a conversation as messages. For training it renders them by the chat template, encodes the whole
text at once, and finds what the assistant said by the characters where it stands. Here the text of a row is that which
its ids spell, which is what rendering gives where a template repeats what was said. What then happens to log-probs:

* a token that is the sampled one, at the place that it has in the row, keeps the log-prob it was sampled under;
* another one, which nobody sampled, has none. It gets the one that the weights say before the update
  (`with_own_logprobs`), as where a trainer computes the old log-probs itself: its probability ratio is 1.
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
        rows: the rows, in their order. The log-prob of a token that nobody sampled is NaN.
        changed_rows: how many have other ids, or another mask, than they were sampled with.
        sampled_tokens: how many tokens were sampled in all.
        lost_tokens: how many of them are not trained, because others stand in their place.
        foreign_tokens: how many tokens are trained that nobody sampled.
    """

    rows: tuple[Row, ...]
    changed_rows: int
    sampled_tokens: int
    lost_tokens: int
    foreign_tokens: int

    @property
    def metrics(self) -> dict[str, float]:
        """What was changed, as metrics of a training step."""
        sampled = max(self.sampled_tokens, 1)
        return {
            "retokenization/changed_rows_fraction": self.changed_rows / max(len(self.rows), 1),
            "retokenization/lost_tokens_fraction": self.lost_tokens / sampled,
            "retokenization/foreign_tokens_fraction": self.foreign_tokens / sampled,
        }


def retokenize(rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast) -> RetokenizedRows:
    """The rows with ids made of their text again. A row none of whose sampled text is left over keeps its ids.

    Raises:
        ConfigError: a row holds images, whose placeholders text does not tell.
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
    """The rows with the log-probs that ``model`` gives, where the behaviour's are missing."""
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
    """A `PolicyUpdater` that trains on re-tokenized text. Its metrics say what that changed.

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
        raise ConfigError("A row holds images, whose placeholders text does not tell, so it cannot be re-tokenized.")
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
    """The text of a row, and where in it the sampled parts begin and end."""
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
    """The places of tokens that were sampled and are to be trained, in the row and in the new ids."""
    matcher = difflib.SequenceMatcher(None, list(row.ids), list(ids), autojunk=False)
    for old, new, length in matcher.get_matching_blocks():
        for offset in range(length):
            if row.loss_mask[old + offset] and mask[new + offset]:
                yield old + offset, new + offset


def _turns(row: Row, mask: Sequence[int]) -> tuple[RowTurn, ...]:
    """The row's turns at their new places; none where they cannot be told apart any more."""
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

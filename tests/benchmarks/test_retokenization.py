"""Re-tokenization: text that was sampled as the tokenizer encodes it stays; other text is encoded again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError
from agentfly.core.messages import Image, PlacedImage
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories
from agentfly.evaluation.token_audit import audit_tokens
from agentfly.policies.catalog import resolve_model
from agentfly.policies.embedded.scoring import score_tokens
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.load import load_policy
from agentfly.training import trainer
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.rows import Row, RowTurn
from agentfly.training.trainer import Trainer
from benchmarks.studies.retokenization import retokenize, retokenizing_updater, with_own_logprobs


@reward
def later(context: Context) -> float:
    """Later attempts get higher rewards."""
    return context.attempt / 4


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.load(resolve_model("tiny"))


def row_of(*parts: list[int]) -> Row:
    """A row of parts that are prompt or observation, sampled, prompt or observation, …; each sampled token is sure."""
    ids = [token for part in parts for token in part]
    mask = [number % 2 for number, part in enumerate(parts) for _ in part]
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return Row(
        ids=ids,
        loss_mask=mask,
        logprobs=[-float(place) if sampled else math.nan for place, sampled in enumerate(mask)],
        versions=[3 if sampled else -1 for sampled in mask],
        group_id="g",
        rollout_id="r",
        reward=1.0,
        truncated=False,
        turns=tuple(
            RowTurn(index=number // 2, start=starts[number], stop=starts[number] + len(part), anchor=f"state {number}")
            for number, part in enumerate(parts)
            if number % 2
        ),
    )


def spelled(tokenizer: HFTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.hf.encode(text, add_special_tokens=False)
    return ids


def test_rows_that_spell_their_text_as_the_tokenizer_does_stay_as_they_are(tokenizer):
    row = row_of(
        spelled(tokenizer, "<|im_start|>user\nHow is the tea?<|im_end|>\n<|im_start|>assistant\n"),
        spelled(tokenizer, "check it<|im_end|>"),
        spelled(tokenizer, "\n<|im_start|>tool\nlow<|im_end|>\n<|im_start|>assistant\n"),
        spelled(tokenizer, "order two<|im_end|>"),
    )
    again = retokenize([row], tokenizer.hf)
    assert (again.changed_rows, again.lost_tokens, again.foreign_tokens) == (0, 0, 0)
    (same,) = again.rows
    assert (list(same.ids), list(same.loss_mask)) == (list(row.ids), list(row.loss_mask))
    assert same.target_logprobs == row.target_logprobs
    assert same.turns == row.turns
    assert set(again.metrics.values()) == {0.0}


def test_a_word_sampled_in_letters_becomes_the_word_and_has_no_log_prob_of_its_own(tokenizer):
    opening = spelled(tokenizer, "<|im_start|>assistant\n")
    letters = [spelled(tokenizer, letter)[0] for letter in "honey"]
    end = spelled(tokenizer, "<|im_end|>")
    (word,) = spelled(tokenizer, "honey")
    row = row_of(opening, [*letters, *end], spelled(tokenizer, "\n"))
    again = retokenize([row], tokenizer.hf)
    (changed,) = again.rows
    assert list(changed.ids) == [*opening, word, *end, *spelled(tokenizer, "\n")]
    assert list(changed.loss_mask) == [0] * len(opening) + [1, 1] + [0] * len(spelled(tokenizer, "\n"))
    assert math.isnan(changed.target_logprobs[0])
    assert changed.target_logprobs[1] == row.target_logprobs[-1]  # the end of the turn is the token it was
    assert changed.turns == (replace(row.turns[0], stop=len(opening) + 2),)
    assert (again.changed_rows, again.sampled_tokens, again.lost_tokens, again.foreign_tokens) == (1, 6, 5, 1)


def test_a_character_merged_with_the_rendered_text_before_it_is_not_trained(tokenizer):
    fast = tokenizer.hf
    pair = next(  # a token of two characters whose halves are tokens too
        token
        for token in range(len(fast))
        if len(text := fast.decode([token])) == 2 and text.isalpha() and spelled(tokenizer, text) == [token]
    )
    first, second = (spelled(tokenizer, half)[0] for half in fast.decode([pair]))
    row = row_of([first], [second, *spelled(tokenizer, "<|im_end|>")])
    (changed,) = retokenize([row], fast).rows
    assert list(changed.ids) == [pair, *spelled(tokenizer, "<|im_end|>")]
    assert list(changed.loss_mask) == [0, 1]


def test_tokens_that_were_not_sampled_get_the_log_probs_of_the_model(tokenizer):
    opening = spelled(tokenizer, "<|im_start|>assistant\n")
    letters = [spelled(tokenizer, letter)[0] for letter in "honey"]
    changed = retokenize([row_of(opening, [*letters, *spelled(tokenizer, "<|im_end|>")])], tokenizer.hf).rows
    model = load_policy("tiny", dtype="float32", threads=1, seed=0).model
    (complete,) = with_own_logprobs(changed, model, 0.7)
    with torch.no_grad():
        scores = score_tokens(model, [complete.ids], [complete.targets], temperature=0.7)
    assert complete.target_logprobs[0] == pytest.approx(float(scores.logprobs[0]))
    assert complete.target_logprobs[1] == changed[0].target_logprobs[1]


async def test_a_retokenizing_run_counts_its_changes_and_keeps_the_sampled_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "PolicyUpdater", retokenizing_updater(2.0))
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=6, temperature=2.0)  # so hot that it seldom spells
    config = TrainConfig(steps=1, tasks_per_step=2, attempts=4, learning_rate=1e-3, dtype="float32", threads=1)
    result = await Trainer(agent, ["Spell apple.", "Spell sun."], later, run_dir=tmp_path, config=config).run()
    metrics = result.metrics[1]
    assert 0 < metrics["retokenization/lost_tokens_fraction"] < 1
    assert metrics["retokenization/changed_rows_fraction"] > 0.5
    assert metrics["mismatch/k3_kl"] > 1e-5  # of the tokens that stayed, behind others that did not
    audit = audit_tokens(
        load_trajectories(RunDirectory(tmp_path).trajectories_file(1)), HFTokenizer.load(resolve_model("tiny"))
    )
    assert audit.faults == []
    assert audit.drifted_tokens > 0


def test_images_cannot_be_retokenized(tokenizer):
    row = replace(row_of([5, 6], [7]), images=(PlacedImage(Image(b"png"), 0, 1),))
    with pytest.raises(ConfigError, match="images"):
        retokenize([row], tokenizer.hf)

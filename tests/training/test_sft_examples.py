"""Examples of a warm start: successful trajectories, with their own ids or rendered, and held-out tasks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import agentfly as af
from agentfly.core.errors import Boundary, ConfigError
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure, FinishReason, Trajectory, save_trajectories
from agentfly.policies.catalog import resolve_model
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.dataset import SFTDataset, build_dataset, load_data

AGENT = af.Agent(model="tiny", max_turns=1)
LOST = Failure(Boundary.RESOURCE, "ResourceDied", "gone", by_policy=False)


@af.reward
def asked(context: af.Context, worth: float) -> float:
    """Return the task's reward, slightly lower for each later attempt."""
    return worth - context.attempt / 100


@cache
def tiny() -> HFTokenizer:
    return HFTokenizer.load(resolve_model("tiny"))


@cache
def oracles() -> tuple[Trajectory, ...]:
    """Six tasks of three attempts each: rewards 1, 0.99, 0.98 of the even ones, and about 0 of the odd ones."""
    tasks = [af.Task(f"Say {n}.", {"worth": float(n % 2 == 0)}, id=f"task-{n}") for n in range(6)]
    policy = ScriptedPolicy(lambda prompt, turn: f"It is {prompt.count('a')}.")
    return tuple(asyncio.run(af.run(AGENT, tasks, reward=asked, attempts=3, policy=policy)).trajectories)


def examples(trajectories=None, tokenizer=None, **settings) -> SFTDataset:
    given = list(oracles() if trajectories is None else trajectories)
    config = SFTConfig(**{"eval_fraction": 0.0, "min_reward": 0.5, "distinct": False, **settings})
    return build_dataset(given, AGENT, tokenizer or tiny(), config, max_tokens=500)


def test_trajectories_that_won_are_learned_from_and_the_others_counted():
    found = examples()
    assert len(found.rows) == found.rendered == 9
    assert {row.group_id for row in found.rows} == {one.group_id for one in oracles() if one.reward > 0.5}
    assert found.excluded == {"low_reward": 9}
    assert len(examples(min_reward=1.0).rows) == 3


def test_unscored_and_failed_trajectories_are_never_trained_on():
    first, second, third, *rest = oracles()
    spoiled = [
        replace(first, failure=LOST),
        replace(second, finish_reason=FinishReason.CANCELLED),
        replace(third, reward=None),
        *rest,
    ]
    found = examples(spoiled)
    assert len(found.rows) == 6
    assert found.excluded == {"infrastructure": 1, "cancelled": 1, "unscored": 1, "low_reward": 9}


def test_of_a_task_the_best_are_taken():
    found = examples(max_per_task=2)
    assert sorted({row.reward for row in found.rows}) == [0.99, 1.0]
    assert found.excluded["beyond_max_per_task"] == 3


def test_rows_of_the_same_tokens_count_once():
    found = examples(distinct=True)
    assert len(found.rows) == 3
    assert found.excluded == {"low_reward": 9, "repeated": 6}


def test_whole_tasks_are_held_out_and_the_same_ones_in_any_order():
    found, turned = examples(eval_fraction=0.34), examples(reversed(oracles()), eval_fraction=0.34)
    learned, held_out = ({row.group_id for row in rows} for rows in (found.rows, found.held_out))
    assert len(held_out) == 1
    assert len(learned) == 2
    assert not learned & held_out
    assert {row.group_id for row in turned.held_out} == held_out
    others = [{row.group_id for row in examples(eval_fraction=0.34, seed=seed).held_out} for seed in range(8)]
    assert any(one != held_out for one in others)


def test_there_is_always_something_to_learn():
    one_task = [one for one in oracles() if one.task.id == "task-0"]
    found = examples(one_task, eval_fraction=0.9)
    assert (len(found.rows), len(found.held_out)) == (3, 0)


def test_ids_of_this_model_are_used_unchanged_and_ids_of_another_model_are_not():
    own = examples(tokenizer=ByteTokenizer())
    assert (own.sampled, own.rendered) == (9, 0)
    sampled = [list(one.sequences[0].ids) for one in oracles() if one.reward > 0.5]
    assert [list(row.ids) for row in own.rows] == sampled
    again = examples(tokenizer=ByteTokenizer(), tokens="rendered")
    assert (again.sampled, again.rendered) == (0, 9)
    assert [(list(r.ids), list(r.loss_mask)) for r in again.rows] == [
        (list(r.ids), list(r.loss_mask)) for r in own.rows
    ]
    with pytest.raises(ConfigError, match="9 no tokens"):
        examples(tokens="sampled")


class Larger(ByteTokenizer):
    """The tokenizer of a model with a padded output layer. Padding ids decode to nothing."""

    def decode(self, ids):
        return super().decode([one for one in ids if one in self.vocabulary_ids])


def test_ids_that_no_token_has_are_never_learned_though_the_text_is_spelled_all_the_same():
    oracle = oracles()[0]
    [turn], [sequence] = oracle.turns, oracle.sequences
    padded = TokenSequence()
    padded.append_prompt(sequence.ids[: turn.start])
    sampled = [300, *sequence.ids[turn.start : turn.stop]]
    padded.append_sampled(sampled, [0.0] * len(sampled), 0)
    spelled = replace(oracle, sequences=[padded], turns=[replace(turn, stop=turn.stop + 1)])
    found = examples([spelled, *oracles()[1:]], tokenizer=Larger())
    assert (found.sampled, found.rendered) == (8, 1)
    assert all(max(row.ids) < 300 for row in found.rows)


def test_the_fingerprint_tells_rows_apart():
    assert examples().fingerprint == examples().fingerprint
    assert examples().fingerprint != examples(max_per_task=2).fingerprint
    assert examples().fingerprint != examples(eval_fraction=0.34).fingerprint


def test_missing_training_data_is_reported_with_the_causes():
    with pytest.raises(ConfigError, match=r"18 low reward. Those of a reward of at least sft.min_reward=2.0"):
        examples(min_reward=2.0)


def test_data_are_runs_files_or_trajectories(tmp_path: Path):
    file = tmp_path / "run" / "trajectories" / "rollout-000000.jsonl"
    file.parent.mkdir(parents=True)
    save_trajectories(oracles(), file)
    assert load_data(tmp_path / "run") == load_data(str(file)) == load_data(oracles()) == list(oracles())
    assert len(load_data([tmp_path / "run", file])) == 36
    with pytest.raises(ConfigError, match="does not exist"):
        load_data(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no trajectories"):
        load_data(tmp_path / "empty")

"""The token audit: what re-tokenizing would change, and whether the recorded tokens are the sampled ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentfly as af
from agentfly.core.tokens import Origin, TokenSequence
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.evaluation.token_audit import audit_tokens
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy

IM_END = 257


class MergingTokenizer(ByteTokenizer):
    """Encodes ``ab`` as one id, though a model may sample it as two."""

    merged = 300

    def encode_text(self, text):
        head, *rest = (super(MergingTokenizer, self).encode_text(part) for part in text.split("ab"))
        return [*head, *(one for part in rest for one in (self.merged, *part))]

    def decode(self, ids):
        return super().decode([one for token in ids for one in (b"ab" if token == self.merged else [token])])


def trajectory(*sampled: list[int]) -> Trajectory:
    """A rollout of one sequence, with these turns."""
    tokenizer, sequence, turns = MergingTokenizer(), TokenSequence(), []
    sequence.append_prompt([1, 2])
    for index, ids in enumerate(sampled):
        start = len(sequence)
        sequence.append_sampled(ids, [-0.5] * len(ids), 0)
        text = tokenizer.decode(ids[:-1])
        turns.append(Turn(index=index, sequence=0, start=start, stop=len(sequence), text=text, ended_by_model=True))
        sequence.append_observation([7])
    return Trajectory("r", "g", af.Task("q"), turns=turns, sequences=[sequence.freeze()])


def test_a_spelling_that_the_tokenizer_would_not_choose_is_counted_and_shown():
    exact = trajectory([300, ord("c"), IM_END])
    drifting = trajectory([*b"abc", IM_END], [*b"xy", IM_END])
    found = audit_tokens([exact, drifting], MergingTokenizer())
    assert (found.trajectories, found.drifted_trajectories, found.drifted_trajectory_share) == (2, 1, 0.5)
    assert (found.sampled_tokens, found.drifted_tokens) == (10, 2)
    [example] = found.examples
    assert (example.turn, example.sampled, example.encoded) == (0, ("a", "b"), ("ab",))
    assert found.faults == []


@given(st.lists(st.lists(st.sampled_from([*b"abc", 300]), max_size=12), min_size=1, max_size=4))
def test_only_what_encodes_otherwise_drifts_and_never_more_than_there_is(turns):
    made = trajectory(*([*ids, IM_END] for ids in turns))
    found = audit_tokens([made], MergingTokenizer())
    tokenizer = MergingTokenizer()
    other = [ids for ids in turns if tokenizer.encode_text(tokenizer.decode(ids)) != ids]
    assert found.drifted_trajectories == bool(other)
    assert len(other) <= found.drifted_tokens <= sum(len(ids) + 1 for ids in other)
    assert found.faults == []


def swap(made: Trajectory) -> None:
    made.sequences[0].ids[2] = ord("z")


def mark_rendered(made: Trajectory) -> None:
    made.sequences[0].origins[0] = Origin.SAMPLED


def unmark_sampled(made: Trajectory) -> None:
    made.sequences[0].origins[3] = Origin.OBSERVATION


def change_text(made: Trajectory) -> None:
    made.turns[0] = replace(made.turns[0], text="something else")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (swap, "do not spell its text"),
        (mark_rendered, "that no turn sampled"),
        (unmark_sampled, "not all marked as sampled"),
        (change_text, "do not spell its text"),
    ],
)
def test_ids_that_are_not_what_was_sampled_are_a_fault(damage, fault):
    made = trajectory([*b"abc", IM_END])
    damage(made)
    assert any(fault in line for line in audit_tokens([made], MergingTokenizer()).faults)


async def test_a_run_under_either_strategy_has_no_fault_and_drifts_where_the_model_spelled_oddly():
    class Spelling(ScriptedPolicy):
        def __init__(self):
            super().__init__(["unused"])
            self.tokenizer = MergingTokenizer()

        async def generate(self, prompt_ids, sampling, *, rollout_id, images=()):
            ids = [*b"abc", IM_END]
            return Generation(ids, [-0.5] * len(ids), "stop", 0)

    for strategy in ("chain", "step"):
        result = await af.run(af.Agent(model="scripted"), ["go"], policy=Spelling(), strategy=strategy)
        found = audit_tokens(result.trajectories, Spelling().tokenizer)
        assert (found.faults, found.drifted_trajectories) == ([], 1)

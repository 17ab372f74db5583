"""TokenSequence: all data of a token is appended and cut together."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.core.errors import TokenInvariantError
from agentfly.core.messages import Image, PlacedImage
from agentfly.core.tokens import NO_VERSION, Origin, Span, TokenSequence


def two_turns() -> TokenSequence:
    sequence = TokenSequence()
    sequence.append_prompt([1, 2, 3])
    sequence.append_sampled([4, 5], [-0.5, -0.25], version=3)
    sequence.append_observation([6, 7])
    sequence.append_sampled([8], [-1.0], version=4)
    return sequence


def test_the_mask_is_1_exactly_on_sampled_tokens():
    assert two_turns().loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]


def test_every_token_knows_where_it_came_from():
    sequence = two_turns()
    assert sequence.spans == [
        Span(Origin.PROMPT, 0, 3),
        Span(Origin.SAMPLED, 3, 5),
        Span(Origin.OBSERVATION, 5, 7),
        Span(Origin.SAMPLED, 7, 8),
    ]
    assert list(sequence.versions) == [NO_VERSION] * 3 + [3, 3] + [NO_VERSION] * 2 + [4]
    assert [math.isnan(value) for value in sequence.logprobs] == [True] * 3 + [False] * 2 + [True] * 2 + [False]


def test_a_cut_cuts_all_arrays_at_one_index_and_is_flagged():
    sequence = two_turns()
    sequence.truncate(4)
    assert [list(sequence.ids), sequence.loss_mask] == [[1, 2, 3, 4], [0, 0, 0, 1]]
    assert len(sequence.logprobs) == len(sequence.versions) == 4
    assert sequence.truncated


IMAGE = Image(b"\x89PNG")


@pytest.mark.parametrize(("length", "kept"), [(8, 8), (7, 7), (6, 4), (5, 4), (4, 4)])
def test_a_cut_never_parts_the_tokens_of_an_image(length, kept):
    sequence = TokenSequence()
    sequence.append_prompt([1, 2])
    sequence.append_sampled([3, 4], [-0.5, -0.25], version=0)
    sequence.append_observation([7, 7, 7, 5], [PlacedImage(IMAGE, 0, 3)])
    sequence.truncate(length)
    assert len(sequence) == len(sequence.loss_mask) == kept
    assert sequence.images == ([PlacedImage(IMAGE, 4, 7)] if kept >= 7 else [])
    assert TokenSequence.from_json(json.loads(json.dumps(sequence.to_json()))) == sequence


def test_tokens_sampled_while_the_weights_changed_keep_the_version_of_each():
    sequence = TokenSequence()
    sequence.append_sampled([3, 4, 5], [-0.5] * 3, version=[6, 6, 7], raw_logprobs=[-1.0, -2.0, -3.0])
    loaded = TokenSequence.from_json(sequence.to_json())
    assert (list(loaded.versions), list(loaded.raw_logprobs)) == ([6, 6, 7], [-1.0, -2.0, -3.0])
    with pytest.raises(TokenInvariantError, match="2 versions"):
        TokenSequence().append_sampled([3], [-0.5], version=[6, 7])


def test_a_cut_beyond_the_end_changes_nothing():
    sequence = two_turns()
    sequence.truncate(8)
    assert len(sequence) == 8
    assert not sequence.truncated


@pytest.mark.parametrize("logprobs", [[-0.1], [-0.1, -0.2, -0.3], [-0.1, math.nan], [-0.1, -math.inf], [-0.1, 0.5]])
def test_logprobs_that_do_not_fit_the_sampled_ids_are_refused_and_nothing_is_added(logprobs):
    sequence = two_turns()
    with pytest.raises(TokenInvariantError):
        sequence.append_sampled([9, 10], logprobs, version=0)
    assert len(sequence) == 8


@pytest.mark.parametrize(
    ("ids", "version"), [([9.5], 0), (["9"], 0), ([2**40], 0), ([9], None), ([9], [None]), ([9], 1.5), (None, 0)]
)
def test_ids_and_versions_that_are_no_integers_are_refused_and_nothing_is_added(ids, version):
    sequence = two_turns()
    with pytest.raises(TokenInvariantError):
        sequence.append_sampled(ids, [-0.1], version=version)
    sequence.check()
    assert len(sequence) == 8


def test_a_finished_sequence_refuses_every_change():
    sequence = two_turns().freeze()
    for change in (
        lambda: sequence.append_observation([1]),
        lambda: sequence.append_sampled([1], [0.0], version=0),
        lambda: sequence.append_prompt([1]),
        lambda: sequence.truncate(1),
    ):
        with pytest.raises(TokenInvariantError):
            change()


def test_prompt_tokens_cannot_follow_sampled_ones():
    with pytest.raises(TokenInvariantError):
        two_turns().append_prompt([1])


logprobs = st.one_of(st.none(), st.floats(max_value=0, allow_nan=False, allow_infinity=False))
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(st.lists(st.tuples(ids, st.booleans(), st.floats(-30, 0), st.integers(0, 9), st.booleans()), max_size=6))
def test_any_sequence_survives_json_without_loss(parts):
    sequence = TokenSequence()
    for part, sampled, logprob, version, known in parts:
        if sampled:
            sequence.append_sampled(part, [logprob] * len(part) if known else None, version)
        else:
            sequence.append_observation(part)
    loaded = TokenSequence.from_json(json.loads(json.dumps(sequence.to_json(), allow_nan=False)))
    assert loaded == sequence
    assert (loaded.ids, loaded.origins, loaded.versions) == (sequence.ids, sequence.origins, sequence.versions)


@pytest.mark.parametrize("name", ["ids", "logprobs", "raw_logprobs", "versions"])
def test_a_damaged_record_is_refused(name):
    value = two_turns().to_json()
    value[name] = value[name][:-1]
    with pytest.raises(TokenInvariantError):
        TokenSequence.from_json(value)


@pytest.mark.parametrize("name", ["ids", "logprobs", "raw_logprobs", "versions"])
def test_a_record_with_something_too_much_is_refused(name):
    value = two_turns().to_json()
    value[name] = [*value[name], [0, 1] if name == "versions" else None]
    with pytest.raises(TokenInvariantError):
        TokenSequence.from_json(value)

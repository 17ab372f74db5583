"""Branching trajectories, as gateways and parallel subagents make them. Advantages are estimated along each branch,
from the turn that it continues."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, RowBatch, RowTurn, cut_rows, predecessors_within

Follows = Sequence[tuple[int, ...]]
"""For each turn, those that it follows."""


def row(turns: Sequence[RowTurn], rollout: str = "a", reward: float = 1.0, **others: object) -> Row:
    mask = [0] * (max(turn.stop for turn in turns) + 1)
    for turn in turns:
        mask[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
    logprobs = [-0.5 if sampled else math.nan for sampled in mask]
    return Row([7] * len(mask), mask, logprobs, [0] * len(mask), "g", rollout, reward, False, turns=tuple(turns))


def row_a_turn(parent_turns: Follows, sizes: Sequence[int], reward: float = 1.0) -> list[Row]:
    """A row for each turn, turn ``n`` with ``sizes[n]`` tokens."""
    return [
        row([RowTurn(number, 1, 1 + size, parent_turns=before)], reward=reward)
        for number, (before, size) in enumerate(zip(parent_turns, sizes, strict=True))
    ]


def judge(name: str, evidence: AdvantageInputs, **config: float) -> Advantages:
    return ALGORITHMS[name].estimate(evidence, AdvantageConfig(**config))  # type: ignore[arg-type]


def returns(evidence: AdvantageInputs, **config: float) -> list[list[float]]:
    found = judge("gae", evidence, **config).returns
    assert found is not None
    return [values.tolist() for values in found]


ROOT_AND_THREE_BRANCHES: Follows = [(), (0,), (0,), (0,)]
PARALLEL_SUBAGENTS_AND_BACK: Follows = [(), (0,), (0,), (1, 2)]


def nothing_expected(rows: Sequence[Row]) -> AdvantageInputs:
    return AdvantageInputs(rows, values=[np.zeros(len(one.targets)) for one in rows])


def test_each_branch_ends_with_the_whole_reward_and_the_root_expects_their_mean() -> None:
    rows = row_a_turn(ROOT_AND_THREE_BRANCHES, [1, 2, 2, 2])
    assert returns(nothing_expected(rows), gae_lambda=0.95) == [
        pytest.approx([0.95**2]),
        *[pytest.approx([0.95, 1.0])] * 3,
    ]


def test_parallel_subagents_each_lead_to_the_turn_that_they_answer() -> None:
    rows = row_a_turn(PARALLEL_SUBAGENTS_AND_BACK, [1, 1, 3, 1])
    assert returns(nothing_expected(rows), discount=0.5) == [
        pytest.approx([(0.5**2 + 0.5**4) / 2]),
        [0.5],
        [0.125, 0.25, 0.5],
        [1.0],
    ]


def test_remax_gives_the_root_the_mean_of_its_branches_penalties_and_not_their_sum() -> None:
    rows = row_a_turn(ROOT_AND_THREE_BRANCHES, [1, 1, 1, 1])
    penalties = [np.array([-1.0]), np.array([-0.3]), np.array([-0.6]), np.array([0.0])]
    found = judge("remax", AdvantageInputs(rows, token_rewards=penalties, baselines={"g": 0.0}))
    assert [values.tolist() for values in found.values] == [pytest.approx([-0.3]), [0.7], [0.4], [1.0]]


def test_gigpo_goes_back_from_each_branch_to_its_own_parent() -> None:
    tree = [
        row([RowTurn(number, 1, 2, None, f"state {number}" if number else "begin", parent_turns=before)])
        for number, before in enumerate(ROOT_AND_THREE_BRANCHES)
    ]
    other = [row([RowTurn(0, 1, 2, None, "begin", parent_turns=())], rollout="b", reward=0.0)]
    found = judge("gigpo", AdvantageInputs([*tree, *other]), step_discount=0.5, divide_by_std=False)
    # Returns in the state "begin": 1/2 (one step before each branch's end, which is 1) and 0.
    assert [values.tolist() for values in found.values] == [[0.5 + 0.25], [0.5], [0.5], [0.5], [-0.5 - 0.25]]


def test_gigpo_follows_turns_through_parallel_subagents() -> None:
    own = row([RowTurn(0, 1, 2, None, "begin", parent_turns=()), RowTurn(3, 3, 4, None, "later", parent_turns=(1, 2))])
    helpers = [Row(**{**vars(row([RowTurn(number, 1, 2, parent_turns=(0,))])), "agent": "helper"}) for number in (1, 2)]
    other = row([RowTurn(0, 1, 2, None, "begin", parent_turns=())], rollout="b", reward=0.0)
    found = judge("gigpo", AdvantageInputs([own, *helpers, other]), step_discount=0.5, divide_by_std=False)
    assert found.values[0].tolist() == [0.5 + 0.25, 0.5]


def test_branches_after_a_removed_row_follow_the_turns_before_it() -> None:
    rows = row_a_turn([(), (0,), (1,), (1,)], [1, 9, 1, 1])
    hollow = Row(**{**vars(rows[1]), "ids": [7] * 40, "loss_mask": [0] * 30 + [1] * 9 + [0],
                    "logprobs": [math.nan] * 30 + [-0.5] * 9 + [math.nan], "versions": [0] * 40,
                    "turns": (RowTurn(1, 30, 39, parent_turns=(0,)),)})  # fmt: skip
    kept = cut_rows(RowBatch((rows[0], hollow, *rows[2:]), {}), 20).rows
    assert [turn.parent_turns for one in kept for turn in one.turns] == [(), (0,), (0,)]
    assert returns(nothing_expected(kept), discount=0.5) == [[0.5], [1.0], [1.0]]


def test_a_turn_that_was_left_without_tokens_is_passed_through() -> None:
    cut = row([RowTurn(0, 1, 2, parent_turns=()), RowTurn(1, 2, 2, parent_turns=(0,))])
    branches = [row([RowTurn(number, 1, 2, parent_turns=(1,))]) for number in (2, 3)]
    assert returns(nothing_expected([cut, *branches]), discount=0.5) == [[0.5], [1.0], [1.0]]


def test_returns_pass_through_excluded_turns_to_earlier_ones() -> None:
    parent_turns = {0: (), 1: (0,), 2: (0,), 3: (1, 2), 4: (3,), 5: None}
    assert predecessors_within(parent_turns, {0, 2, 4, 5}) == {0: (), 2: (0,), 4: (0, 2), 5: (4,)}
    assert predecessors_within(parent_turns, {4}) == {4: ()}


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    """Turns that follow one or two earlier ones, or none, with their numbers of tokens."""
    count = draw(st.integers(1, 7))
    parent_turns = [
        tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        for number in range(count)
    ]
    return parent_turns, draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))


def ways(parent_turns: Follows, turn: int) -> list[tuple[float, list[int]]]:
    """All ways from a turn to an end, each with its probability where every follower is as likely."""
    followers = [number for number, before in enumerate(parent_turns) if turn in before]
    if not followers:
        return [(1.0, [turn])]
    return [
        (share / len(followers), [turn, *way]) for follower in followers for share, way in ways(parent_turns, follower)
    ]


@given(trees(), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.5]), st.integers(0, 2**32 - 1))
def test_the_return_of_a_token_is_the_mean_over_its_continuations(
    tree: tuple[list[tuple[int, ...]], list[int]], discount: float, gae_lambda: float, seed: int
) -> None:
    """The expected value is the mean over the branches, weighted by their probability."""
    parent_turns, sizes = tree
    random = np.random.default_rng(seed)
    values, penalties = ([random.normal(size=size) for size in sizes] for _ in range(2))
    rows = row_a_turn(parent_turns, sizes)
    order = random.permutation(len(rows)).tolist()
    evidence = AdvantageInputs(
        [rows[number] for number in order],
        values=[values[number] for number in order],
        token_rewards=[penalties[number] for number in order],
    )
    found = dict(zip(order, returns(evidence, discount=discount, gae_lambda=gae_lambda), strict=True))
    for turn, size in enumerate(sizes):
        expected = np.zeros(size)
        for share, way in ways(parent_turns, turn):
            chain = AdvantageInputs(
                row_a_turn([(place - 1,) if place else () for place in range(len(way))], [sizes[one] for one in way]),
                values=[values[one] for one in way],
                token_rewards=[penalties[one] for one in way],
            )
            expected += share * np.array(returns(chain, discount=discount, gae_lambda=gae_lambda)[0])
        assert found[turn] == pytest.approx(expected.tolist(), abs=1e-9)

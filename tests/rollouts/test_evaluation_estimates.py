"""Estimates of evaluations agree with brute force and published tables, and cover the truth as often as stated."""

from __future__ import annotations

import itertools
import math
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.evaluation.statistics import (
    difference_of_shares,
    mean_over_tasks,
    pass_at_k,
    pass_hat_k,
    proportion_over_tasks,
    student_t_quantile,
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_that_hold_a_success(attempts, data):
    k = data.draw(st.integers(1, len(attempts)))
    choices = list(itertools.combinations(attempts, k))
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(sum(map(any, choices)) / len(choices))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_hat_k_is_the_share_of_all_choices_of_k_attempts_that_hold_successes_only(attempts, data):
    k = data.draw(st.integers(1, len(attempts)))
    choices = list(itertools.combinations(attempts, k))
    assert pass_hat_k(len(attempts), sum(attempts), k) == pytest.approx(sum(map(all, choices)) / len(choices))


def test_pass_at_k_is_exact_where_factorials_are_beyond_floats():
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(("attempts", "successes", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_of_what_cannot_be_is_refused(attempts, successes, k):
    for of_k in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="cannot be estimated"):
            of_k(attempts, successes, k)


@pytest.mark.parametrize(
    ("degrees", "table"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (10, 2.2281), (29, 2.0452), (120, 1.9799), (5000, 1.9600)],
)
def test_students_quantile_is_that_of_the_tables(degrees, table):
    assert student_t_quantile(degrees) == pytest.approx(table, abs=1e-3)


def test_the_interval_of_a_mean_is_students_over_the_means_of_the_tasks():
    # Worked by hand: task means 0, 1, 0.5; their deviation 0.5; error 0.5 / sqrt(3); quantile 4.3027.
    estimate = mean_over_tasks([[0.0, 0.0], [1.0], [0.0, 1.0]])
    assert (estimate.mean, estimate.tasks) == (0.5, 3)
    assert estimate.high == pytest.approx(0.5 + 4.3027 * 0.5 / math.sqrt(3), abs=1e-4)
    assert estimate.low == pytest.approx(0.5 - 4.3027 * 0.5 / math.sqrt(3), abs=1e-4)


def test_one_task_tells_nothing_of_others():
    assert mean_over_tasks([[1.0, 0.0]]).low is None
    assert mean_over_tasks([[1.0, 0.0]]).high is None


@pytest.mark.parametrize("value", [0.0, 0.1, 7.0])
def test_tasks_of_one_mean_tell_no_interval(value):
    estimate = mean_over_tasks([[value] * 3, [value], [value] * 7])
    assert (estimate.mean, estimate.low, estimate.high) == (pytest.approx(value), None, None)  # type: ignore[comparison-overlap]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=12))
def test_a_mean_of_numbers_within_0_and_1_lies_in_an_interval_of_some_width(scores):
    estimate = proportion_over_tasks(scores)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    assert estimate.high > estimate.low


@given(st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=5), min_size=2, max_size=8))
def test_an_attempt_that_is_made_twice_changes_nothing(scores):
    once, twice = mean_over_tasks(scores), mean_over_tasks([task * 2 for task in scores])
    assert (twice.mean, twice.low, twice.high) == pytest.approx((once.mean, once.low, once.high), abs=1e-9)


@pytest.mark.parametrize(
    ("successes", "interval"),
    [
        ([[True]] * 10, (0.7225, 1.0)),  # Wilson's, of 10 in 10
        ([[True], [False]] * 5, (0.2366, 0.7634)),  # of 5 in 10
        ([[False]] * 4 + [[True]], (0.0362, 0.6245)),  # of 1 in 5
        ([[True, False]] * 5, (0.2366, 0.7634)),  # tasks alike: ten attempts are ten attempts
        ([[True, True], [False, False]] * 5, (0.2366, 0.7634)),  # attempts alike: twenty attempts are ten
        ([[True] * 50], (0.2065, 1.0)),  # one task is one task, however often it is tried
    ],
)
def test_the_interval_of_a_share_is_wilsons_of_as_many_attempts_as_are_independent(successes, interval):
    estimate = proportion_over_tasks(successes)
    assert (estimate.low, estimate.high) == pytest.approx(interval, abs=1e-4)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=12))
def test_a_share_lies_in_its_interval_and_that_within_0_and_1(successes):
    estimate = proportion_over_tasks(successes)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    assert estimate.high > estimate.low


@pytest.mark.parametrize("kind", ["mean", "share"])
def test_intervals_hold_the_truth_about_as_often_as_they_say_though_attempts_at_a_task_are_alike(kind):
    chance = random.Random(5)
    held = []
    for _ in range(600):
        # Half of the kind's tasks are solved nine times in ten, half one time in ten: the truth is 0.5.
        tasks = [[chance.random() < rate for _ in range(8)] for rate in chance.choices([0.9, 0.1], k=20)]
        estimate = proportion_over_tasks(tasks) if kind == "share" else mean_over_tasks(tasks)
        held.append(estimate.low <= 0.5 <= estimate.high)
    assert 0.92 <= mean(held) <= 0.985


paired = st.lists(st.tuples(*[st.lists(st.floats(0, 1), min_size=1, max_size=4)] * 2), min_size=1, max_size=12)


@given(paired)
def test_a_difference_of_shares_lies_in_an_interval_of_some_width_between_minus_1_and_1(pairs):
    estimate = difference_of_shares([one for one, _ in pairs], [other for _, other in pairs])
    assert -1 - 1e-12 <= estimate.low <= estimate.mean + 1e-12
    assert estimate.mean - 1e-12 <= estimate.high <= 1 + 1e-12
    assert estimate.high - estimate.low > 1e-6


@given(paired)
def test_the_difference_the_other_way_round_has_the_interval_turned_round(pairs):
    first, second = [one for one, _ in pairs], [other for _, other in pairs]
    one, other = difference_of_shares(first, second), difference_of_shares(second, first)
    assert (other.mean, other.low, other.high) == pytest.approx((-one.mean, -one.high, -one.low), abs=1e-9)


@pytest.mark.parametrize(
    ("both", "first", "second", "neither", "low", "high"),
    [  # Newcombe 1998, table II, method 10: pairs of which both, the first, the second and neither succeeded
        (36, 12, 2, 0, 0.0569, 0.3404),
        (54, 0, 0, 0, -0.0664, 0.0664),
    ],
)
def test_the_interval_of_paired_successes_is_newcombes(both, first, second, neither, low, high):
    ones = [[1.0]] * both + [[1.0]] * first + [[0.0]] * second + [[0.0]] * neither
    others = [[1.0]] * both + [[0.0]] * first + [[1.0]] * second + [[0.0]] * neither
    estimate = difference_of_shares(others, ones)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize(("tasks", "attempts"), [(5, 1), (20, 1), (3, 8), (20, 8)])
def test_the_interval_of_a_difference_of_shares_holds_the_truth_as_often_as_it_says(tasks, attempts):
    chance, rounds, held = random.Random(7), 300, 0
    for _ in range(rounds):
        solved = [chance.betavariate(0.5, 0.5) for _ in range(tasks)]  # how hard a task is, in both
        first, second = ([[float(chance.random() < one) for _ in range(attempts)] for one in solved] for _ in "ab")
        estimate = difference_of_shares(first, second)
        held += estimate.low <= 0.0 <= estimate.high
    assert held / rounds > 0.92

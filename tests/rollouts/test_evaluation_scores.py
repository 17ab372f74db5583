"""Scores by task, and two evaluations compared: unscored attempts are counted, and are in no estimate."""

from __future__ import annotations

import pytest

from agentfly.core.errors import Boundary, ConfigError
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.evaluation.scores import EvaluationComparison, EvaluationScores, default_ks

LOST = Failure(Boundary.RESOURCE, "ResourceDied", "gone", by_policy=False)


def attempts(name: str, *rewards: float | None, prompt: str = "go") -> list[Trajectory]:
    task = Task(f"{prompt} {name}", id=name)
    return [
        Trajectory(f"{name}.{number}", name, task, attempt=number, finish_reason=FinishReason.ANSWERED, reward=reward)
        for number, reward in enumerate(rewards)
    ]


def spoiled(name: str, finish: FinishReason, failure: Failure | None, reward: float | None) -> Trajectory:
    return Trajectory(
        "x", name, Task(f"go {name}", id=name), attempt=9, finish_reason=finish, failure=failure, reward=reward
    )


def test_each_task_counts_once_and_attempts_without_a_score_in_nothing():
    board = EvaluationScores.from_trajectories(
        [
            *attempts("a", 1.0, 0.0, None),
            *attempts("b", 1.0),
            *attempts("c", None),
            spoiled("a", FinishReason.FAILED, LOST, 1.0),
            spoiled("b", FinishReason.CANCELLED, None, 1.0),
        ]
    )
    assert board.reward().mean == board.success().mean == 0.75
    assert board.reward().tasks == 2
    assert board.excluded == {"unscored": 2, "infrastructure": 1, "cancelled": 1}
    assert board.tasks["a"].excluded == {"unscored": 1, "infrastructure": 1}
    assert board.tasks["a"].rewards == (1.0, 0.0)


def test_pass_at_k_is_over_the_tasks_with_as_many_attempts():
    board = EvaluationScores.from_trajectories([*attempts("a", 1.0, 0.0, 0.0), *attempts("b", 0.0, 0.0, None)])
    assert board.pass_at(1) == board.success()
    assert board.pass_at(2).mean == pytest.approx((2 / 3 + 0) / 2)
    assert (board.pass_at(3).mean, board.pass_at(3).tasks) == (1.0, 1)
    assert board.pass_at(4) is None


def test_the_interval_of_pass_at_k_stays_within_0_and_1():
    board = EvaluationScores.from_trajectories(
        [*attempts("a", 1.0, 1.0), *attempts("b", 1.0, 1.0), *attempts("c", 0.0, 0.0)]
    )
    estimate = board.pass_at(2)
    assert (estimate.low, estimate.high) == pytest.approx((0.2077, 0.9385), abs=1e-4)  # Wilson's, of 2 in 3
    assert estimate.mean == pytest.approx(2 / 3)


@pytest.mark.parametrize(("reward", "interval"), [(0.0, (0.0, 0.2775)), (1.0, (0.7225, 1.0))])
def test_no_number_is_sure_because_all_tasks_went_alike(reward, interval):
    board = EvaluationScores.from_trajectories(
        [one for number in range(10) for one in attempts(str(number), reward, reward)]
    )
    for estimate in (board.reward(), board.success(), board.pass_at(2), board.pass_hat(2)):
        assert estimate.mean == reward
        assert (estimate.low, estimate.high) == pytest.approx(interval, abs=1e-4)


def test_rewards_beyond_0_and_1_that_are_alike_in_all_tasks_tell_no_interval():
    estimate = EvaluationScores.from_trajectories([*attempts("a", -2.0), *attempts("b", -2.0)]).reward()
    assert (estimate.mean, estimate.low, estimate.high) == (-2.0, None, None)


def test_pass_hat_k_is_the_chance_that_all_of_k_attempts_succeed():
    board = EvaluationScores.from_trajectories([*attempts("a", 1.0, 1.0, 0.0), *attempts("b", 0.0, 0.0, 0.0)])
    assert board.pass_hat(1) == board.success()
    assert board.pass_hat(2).mean == pytest.approx((1 / 3 + 0) / 2)
    assert board.pass_hat(3).mean == 0.0
    assert board.pass_hat(4) is None
    assert board.to_json([1, 2])["pass_hat"]["2"]["mean"] == board.pass_hat(2).mean


def test_nothing_that_counts_gives_no_number():
    board = EvaluationScores.from_trajectories(attempts("a", None))
    assert board.reward() is board.success() is board.pass_at(1) is None
    assert board.to_json([1])["excluded"] == {"unscored": 1}


def test_success_is_what_the_reward_says_it_is():
    (trajectory,) = attempts("a", 0.3)
    trajectory.metrics["success"] = 1.0
    assert EvaluationScores.from_trajectories([trajectory]).success().mean == 1.0


def test_two_tasks_of_one_id_are_refused():
    with pytest.raises(ConfigError, match="id 'a'"):
        EvaluationScores.from_trajectories([*attempts("a", 1.0), *attempts("a", 1.0, prompt="come")])


@pytest.mark.parametrize(("count", "ks"), [(0, []), (1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_the_usual_ks_go_up_to_all_attempts(count, ks):
    assert default_ks(count) == ks


def test_two_evaluations_are_compared_task_by_task():
    first = [*attempts("a", 0.0, 0.0), *attempts("b", 1.0), *attempts("c", 0.5), *attempts("only", 1.0)]
    second = [*attempts("c", 0.5), *attempts("a", 1.0, 0.0), *attempts("b", 0.0), *attempts("d", 0.0, 1.0)]
    comparison = EvaluationComparison.from_trajectories(first, second)
    assert [pair.task_id for pair in comparison.pairs] == ["a", "b", "c"]
    reward = comparison.reward
    assert (reward.wins, reward.ties, reward.losses) == (1, 1, 1)
    assert (reward.first, reward.second) == (0.5, pytest.approx(1 / 3))  # type: ignore[comparison-overlap]
    assert reward.difference.mean == pytest.approx((0.5 - 1.0 + 0.0) / 3)
    assert comparison.success.difference.mean == pytest.approx((0.5 - 1.0 + 0.0) / 3)
    assert (comparison.only_first, comparison.only_second, comparison.unscored) == (1, 1, 0)


def test_pairing_takes_out_how_hard_the_tasks_are():
    hard = [one for number in range(10) for one in attempts(str(number), float(number))]
    better = [one for number in range(10) for one in attempts(str(number), number + 0.1 + number % 2 / 100)]
    difference = EvaluationComparison.from_trajectories(hard, better).reward.difference
    assert 0 < difference.low < 0.105 < difference.high < 0.2


def test_swapping_the_two_turns_the_sign_and_wins_to_losses():
    first, second = [*attempts("a", 0.0), *attempts("b", 1.0)], [*attempts("a", 0.4), *attempts("b", 1.5)]
    there, back = (
        EvaluationComparison.from_trajectories(first, second).reward,
        EvaluationComparison.from_trajectories(second, first).reward,
    )
    assert (there.wins, there.losses) == (back.losses, back.wins) == (2, 0)
    assert there.difference.low == pytest.approx(-back.difference.high)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (attempts("b", 1.0), "none of the 1 tasks of the first is among the 1"),
        (attempts("a", 1.0, prompt="come"), "1 of 1 tasks with the same id differ"),
        (attempts("a", None), "none of their 1 tasks has a score in both"),
    ],
)
def test_evaluations_of_other_tasks_are_refused(second, told):
    with pytest.raises(ConfigError, match=told):
        EvaluationComparison.from_trajectories(attempts("a", 1.0), second)


def test_a_task_without_a_score_in_one_of_them_is_counted_and_left_out():
    comparison = EvaluationComparison.from_trajectories(
        [*attempts("a", 1.0), *attempts("b", 1.0)], [*attempts("a", None), *attempts("b", 0.0)]
    )
    assert [pair.task_id for pair in comparison.pairs] == ["b"]
    assert comparison.unscored == 1

"""Rows: which trajectories produce them, and what they contain."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agentfly.core.errors import Boundary
from agentfly.core.messages import Image, PlacedImage
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure, Trajectory, Turn
from agentfly.training.metrics import group_metrics, row_metrics
from agentfly.training.rows import Row, rows_from_trajectories


def sequence(*, logprobs_known: bool = True) -> TokenSequence:
    made = TokenSequence()
    made.append_prompt([5, 6])
    made.append_sampled([7, 8], [-0.5, -0.25] if logprobs_known else None, 4)
    made.append_observation([9])
    made.append_sampled([3], [-1.0], 5)
    return made


def trajectory(number: int, **changes: Any) -> Trajectory:
    settings = {"group_id": "g", "reward": 1.0, "sequences": [sequence().freeze()], **changes}
    return Trajectory(rollout_id=f"r{number}", task=Task("q"), **settings)


def failure(*, by_policy: bool) -> Failure:
    return Failure(Boundary.TOOL, "Broken", "it broke", by_policy)


def test_a_row_carries_its_sequence_as_it_is() -> None:
    (row,) = rows_from_trajectories([trajectory(0)]).rows
    assert list(row.ids) == [5, 6, 7, 8, 9, 3]
    assert list(row.loss_mask) == [0, 0, 1, 1, 0, 1]
    assert row.targets == [2, 3, 5]
    assert row.target_logprobs == [-0.5, -0.25, -1.0]
    assert row.oldest_version == 4
    assert (row.group_id, row.rollout_id, row.reward, row.truncated) == ("g", "r0", 1.0, False)


def test_a_row_carries_the_images_of_its_sequence() -> None:
    seen = PlacedImage(Image(b"png"), 1, 3)
    made = TokenSequence()
    made.append_prompt([5, 6, 6], [seen])
    made.append_sampled([7], [-0.5], 4)
    (row,) = rows_from_trajectories([trajectory(0, sequences=[made.freeze()])]).rows
    assert row.images == (seen,)


def test_each_sequence_with_a_sampled_token_gives_a_row_that_knows_its_cut() -> None:
    cut = sequence()
    cut.truncate(4)
    silent = TokenSequence()
    silent.append_prompt([1])
    sequences = [sequence().freeze(), silent.freeze(), cut.freeze()]
    rows = rows_from_trajectories([trajectory(0, sequences=sequences)]).rows
    assert [(row.truncated, len(row)) for row in rows] == [(False, 6), (True, 4)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"reward": None}, "unscored"),
        ({"reward": math.nan}, "unscored"),
        ({"reward": math.inf}, "unscored"),
        ({"failure": failure(by_policy=False)}, "infrastructure"),
        ({"reward": None, "reward_failure": failure(by_policy=False)}, "infrastructure"),
        ({"sequences": []}, "no_sampled_tokens"),
        ({"sequences": [sequence(logprobs_known=False).freeze()]}, "no_logprobs"),
    ],
)
def test_untrainable_trajectories_give_no_row_and_are_counted(changes: dict[str, Any], cause: str) -> None:
    batch = rows_from_trajectories([trajectory(0), trajectory(1, **changes)])
    assert [row.rollout_id for row in batch.rows] == ["r0"]
    assert batch.excluded == {cause: 1}


def test_a_failure_that_the_policy_caused_is_trained_on_with_its_reward() -> None:
    batch = rows_from_trajectories([trajectory(0, failure=failure(by_policy=True), reward=-1.0)])
    assert [row.reward for row in batch.rows] == [-1.0]


def test_rows_of_one_group_lie_side_by_side_however_the_rollouts_ended() -> None:
    mixed = [trajectory(number, group_id="ab"[number % 2]) for number in range(4)]
    assert [row.group_id for row in rows_from_trajectories(mixed).rows] == ["a", "a", "b", "b"]


def test_arrays_of_different_lengths_are_no_row() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Row([1, 2], [0, 1], [math.nan], [0, 0], "g", "r", 1.0, False)


def test_the_metrics_of_a_batch_count_groups_without_learning_signal() -> None:
    groups = {"varied": [1.0, 0.0], "equal": [0.1 + 0.2, 0.3, 0.3], "single": [0.5, None], "empty": [None]}
    trajectories = [  # type: ignore[var-annotated]
        trajectory(number, group_id=group, reward=reward)
        for group, rewards in groups.items()
        for number, reward in enumerate(rewards)  # type: ignore[arg-type]
    ]
    trajectories[0].turns = [Turn(0, 0, 2, 4, "", True, anchor="here"), Turn(1, 0, 5, 6, "", True, anchor="there")]
    trajectories[1].turns = [Turn(0, 0, 2, 4, "", True, anchor="here"), Turn(1, 0, 5, 6, "", True)]
    batch = rows_from_trajectories(trajectories)
    metrics = group_metrics(trajectories, batch) | row_metrics(batch, version=6)
    assert metrics["groups"] == 4
    assert metrics["groups/singleton_fraction"] == 0.25
    assert metrics["groups/zero_variance_fraction"] == 0.25
    assert metrics["groups/empty_fraction"] == 0.25
    assert metrics["anchors/singleton_fraction"] == 0.5
    assert metrics["excluded/unscored"] == 2
    assert metrics["rows"] == 6
    assert metrics["rows/sampled_tokens"] == 18
    assert metrics["policy/staleness_max"] == 2
    nothing = rows_from_trajectories([])
    assert all(
        math.isfinite(value) for value in (group_metrics([], nothing) | row_metrics(nothing, version=0)).values()
    )

"""Metrics of a batch: cancelled and failed rollouts are in no mean, and finish reasons are counted."""

from __future__ import annotations

import math

import pytest

from agentfly.core.errors import Boundary
from agentfly.core.json_values import MAX_SCORE
from agentfly.core.messages import ToolCall
from agentfly.core.task import Task
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure, FinishReason, ToolRecord, Trajectory, Turn
from agentfly.evaluation.scores import EvaluationScores
from agentfly.rollouts.metrics import summarize


def sequence(sampled, *, truncated=False):
    made = TokenSequence()
    made.append_prompt([1, 2])
    made.append_sampled(range(sampled), [-0.1] * sampled, 0)
    made.truncated = truncated
    return made


def record(kind=None):
    failure = Failure(Boundary.TOOL, kind, "no", by_policy=True) if kind else None
    return ToolRecord(ToolCall("call_0", "look", {}), "seen", failure=failure)


def trajectory(finish, *, reward=None, sequences=(), records=(), failure=None):
    turns = [Turn(0, 0, 2, 3, "hi", True, tuple(records))]
    return Trajectory(
        "r",
        "g",
        Task("go"),
        turns=turns,
        sequences=list(sequences),
        finish_reason=finish,
        reward=reward,
        failure=failure,
    )


def test_means_are_over_what_ended_by_itself_and_ends_are_counted_over_all():
    lost = Failure(Boundary.RESOURCE, "ResourceDied", "gone", by_policy=False)
    metrics = summarize(
        [
            trajectory(FinishReason.ANSWERED, reward=1.0, sequences=[sequence(4)], records=[record(), record()]),
            trajectory(
                FinishReason.DONE,
                reward=0.0,
                sequences=[sequence(2), sequence(4, truncated=True), sequence(2)],
                records=[record("UnknownTool"), record("ToolError")],
            ),
            trajectory(FinishReason.CANCELLED, sequences=[sequence(50)], records=[record("UnknownTool")] * 9),
            trajectory(FinishReason.FAILED, sequences=[sequence(50)], failure=lost),
        ]
    )
    assert metrics["rollouts"] == 4
    assert metrics["reward/mean"] == metrics["success/mean"] == 0.5
    assert metrics["response_length/mean"] == 6
    assert metrics["sequences/mean"] == 2
    assert metrics["truncated/rate"] == 0.5
    assert metrics["tool_errors/rate"] == 0.5
    assert metrics["invalid_calls/rate"] == 0.25
    assert metrics["unscored"] == 2
    assert metrics["failures/infrastructure"] == metrics["failures/resource/ResourceDied"] == 1
    ends = {name: count for name, count in metrics.items() if name.startswith("finish/")}
    assert ends == {"finish/answered": 1, "finish/done": 1, "finish/cancelled": 1, "finish/failed": 1}


@pytest.mark.parametrize("trajectories", [[], [trajectory(FinishReason.CANCELLED)]])
def test_where_nothing_ended_by_itself_there_is_no_mean_reward_and_every_number_is_finite(trajectories):
    metrics = summarize(trajectories)
    assert "reward/mean" not in metrics
    assert all(map(math.isfinite, metrics.values()))


def test_breaks_are_the_sequences_beyond_the_first_of_each_conversation():
    one = trajectory(FinishReason.ANSWERED, sequences=[sequence(1)] * 3)
    one.turns = [
        Turn(0, 0, 2, 3, "a", True),
        Turn(1, 1, 2, 3, "b", True, conversation="call_0"),
        Turn(2, 0, 5, 6, "c", True),
        Turn(3, 2, 2, 3, "d", True),
        Turn(4, -1, 0, 0, "e", True, conversation="call_1"),
    ]
    assert summarize([one])["sequence_breaks/mean"] == 1
    assert summarize([trajectory(FinishReason.ANSWERED, sequences=[sequence(1)])])["sequence_breaks/mean"] == 0


def test_lengths_that_nobody_knows_are_left_out():
    metrics = summarize([trajectory(FinishReason.ANSWERED, reward=1.0)])
    assert metrics["turns/mean"] == 1
    assert not {"response_length/mean", "sequences/mean", "sequence_breaks/mean"} & metrics.keys()
    assert summarize([])["response_length/mean"] == 0


def test_the_largest_scores_that_are_taken_make_finite_numbers():
    far = [trajectory(FinishReason.ANSWERED, reward=one) for one in (MAX_SCORE, -MAX_SCORE, MAX_SCORE, MAX_SCORE)]
    for one in far:
        one.metrics["size"] = MAX_SCORE
    metrics = summarize(far)
    assert metrics["reward/mean"] == MAX_SCORE / 2
    assert all(map(math.isfinite, metrics.values()))
    estimate = EvaluationScores.from_trajectories(far).reward()
    assert estimate is not None
    assert math.isfinite(estimate.mean)

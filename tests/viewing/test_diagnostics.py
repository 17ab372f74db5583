from __future__ import annotations

import pytest

from agentfly.viewing.diagnostics import TrainingDiagnostics

IDLE = {"groups/zero_variance_fraction": 1.0, "groups/empty_fraction": 0.0, "policy/grad_norm": 0.0}
TAUGHT = {"groups/zero_variance_fraction": 0.5, "policy/loss": 0.0, "policy/grad_norm": 0.2}


def sentences(*steps: dict[str, float]) -> list[str]:
    lessons = TrainingDiagnostics()
    for metrics in steps:
        lessons.add(metrics)
    return lessons.messages()


def test_steps_in_which_all_attempts_scored_the_same_are_counted():
    assert sentences(TAUGHT) == []
    assert sentences(IDLE, TAUGHT, IDLE) == [
        "nothing learned in 2 of 3 steps: all attempts at each task scored the same"
    ]
    assert sentences(IDLE) == ["nothing learned: all attempts at each task scored the same"]


def test_groups_with_at_most_one_score_have_no_learning_signal():
    shares = {"groups/zero_variance_fraction": 0.2, "groups/singleton_fraction": 0.3, "groups/empty_fraction": 0.5}
    assert len(sentences(shares)) == 1


def test_equal_rewards_that_made_a_loss_were_learned_from():
    assert sentences(IDLE | {"policy/loss": -0.4}) == []


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"policy/updates_skipped": 1.0}, "the gradient was not finite"),
        ({"mismatch/masked_fraction": 1.0}, "rollout correction left out every token"),
        ({"advantages/zero_fraction": 0.2}, "only the critic was trained (critic.warmup_steps)"),
        ({"advantages/zero_fraction": 1.0}, "every advantage was 0"),
        ({"rows": 0.0, "excluded/no_baseline": 4.0}, "no task has the score of a greedy rollout"),
        ({"groups/zero_variance_fraction": 1.0, "rows": 0.0}, "all attempts at each task scored the same"),
    ],
)
def test_a_step_without_an_update_shows_the_reason(metrics, reason):
    output = sentences({"groups/zero_variance_fraction": 0.0, "policy/updates": 0.0} | metrics, TAUGHT)
    assert output == [f"nothing learned in 1 of 2 steps: {reason}"]


def test_clipping_before_any_update_is_reported_with_remedies():
    clipped = TAUGHT | {"policy/clip_fraction_first": 0.21, "policy/staleness_max": 0.0}
    (output,) = sentences(clipped)
    assert output.startswith("21% of the tokens are clipped before any update")
    assert "dtype: float32" in output
    assert sentences(TAUGHT, clipped)[0].startswith("up to 21%")
    assert sentences(clipped | {"policy/clip_fraction_first": 0.001}) == []
    assert sentences(clipped | {"policy/staleness_max": 1.0}) == []  # the weights that sampled were others


def test_failed_tool_calls_are_reported_from_half_of_all_calls():
    calls = {"rollouts": 9.0, "failures/infrastructure": 1.0, "tool_calls/mean": 2.5, "tool_errors/rate": 1.0}
    assert sentences(calls | {"tool_errors/ToolError": 9.0}) == []
    assert sentences(calls | {"tool_errors/UnknownTool": 12.0, "tool_errors/InvalidArguments": 4.0}) == [
        "80% of the tool calls failed (UnknownTool 75%, InvalidArguments 25%)"
    ]


def test_unscored_rollouts_are_counted_by_cause_and_not_as_equal_scores():
    half = IDLE | {"rollouts": 8.0, "unscored": 4.0, "failures/reward/RewardError": 4.0, "groups/empty_fraction": 0.5}
    assert sentences(half, half) == [
        "8 of 16 rollouts unscored: RewardError 8",
        "nothing learned in 2 of 2 steps: all attempts at each task that have a score scored the same",
    ]
    none = half | {"unscored": 8.0, "failures/reward/RewardError": 8.0}
    assert sentences(none)[1] == "nothing learned: no attempt has a score"

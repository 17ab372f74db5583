from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentfly.core.events import EvaluationFinished, StepFinished
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason, Trajectory, Turn, save_trajectories
from agentfly.evaluation.statistics import proportion_over_tasks
from agentfly.viewing.event_log import MetricsWriter
from agentfly.viewing.report import RunSummary, before_and_after, training_report


def trajectory(task: str, reward: float | None, text: str) -> Trajectory:
    turn = Turn(index=0, sequence=-1, start=0, stop=0, text=text, ended_by_model=True)
    return Trajectory(
        f"{task}-{text}", "g", Task(task, id=task), turns=[turn], finish_reason=FinishReason.ANSWERED, reward=reward
    )


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory.create(tmp_path)
    write = MetricsWriter(run)
    write(EvaluationFinished(step=0, metrics={"success/mean": 0.25}))
    for step in range(1, 21):
        write(StepFinished(step=step, metrics={"reward/mean": step / 20}))
    write(EvaluationFinished(step=20, metrics={"success/mean": 0.75}))
    save_trajectories(
        [
            trajectory("a", 0.0, "a early"),
            trajectory("b", 0.4, "b early"),
            trajectory("b", -1.0, "b at its worst"),
            trajectory("b", 1.0, "b by luck"),
            trajectory("c", None, "c early"),
        ],
        run.trajectories_file(0, "eval"),
    )
    save_trajectories(
        [trajectory("a", 0.2, "a late"), trajectory("b", 1.0, "b late"), trajectory("c", 1.0, "c late")],
        run.trajectories_file(20, "eval"),
    )
    return run


def test_the_summary_compares_the_first_and_the_last_tenth_of_the_steps(run):
    summary = RunSummary.of(run)
    assert summary.steps == 20
    assert summary.reward_start == pytest.approx((0.05 + 0.10) / 2)
    assert summary.reward_end == pytest.approx((0.95 + 1.00) / 2)
    assert summary.success_before == proportion_over_tasks([[0.0], [0.0, 0.0, 1.0]])
    assert summary.success_after == proportion_over_tasks([[0.0], [1.0], [1.0]])


def test_success_comes_from_the_metrics_without_interval_if_trajectories_are_missing(run):
    for _, path in run.trajectory_files("eval"):
        path.unlink()
    summary = RunSummary.of(run)
    assert (summary.success_before.mean, summary.success_before.low) == (0.25, None)
    assert (summary.success_after.mean, summary.success_after.high) == (0.75, None)


def test_a_step_in_which_nothing_was_scored_counts_as_a_step_and_in_no_mean(run):
    write = MetricsWriter(run)
    write(StepFinished(step=21, metrics={"unscored": 4.0}))
    write(EvaluationFinished(step=21, metrics={"unscored": 4.0}))
    summary = RunSummary.of(run)
    assert (summary.steps, len(summary.rewards)) == (21, 20)
    assert summary.success_after == proportion_over_tasks([[0.0], [1.0], [1.0]])


def test_the_two_trajectories_are_of_one_task_and_show_the_change(run):
    before, after = before_and_after(run)
    assert (before.turns[0].text, after.turns[0].text) == ("b early", "b late")


def test_the_report_shows_the_figures_the_curve_both_trajectories_and_the_files(run):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(training_report(run))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "20 training steps",
        "mean reward, first and last 2 steps",
        "0.08",
        "0.97",
        "held-out rollouts solved",
        "17%",
        "67%",
        "95% interval over the tasks",
        "b early",
        "b late",
        str(run.metrics_file),
    ):
        assert expected in shown
    assert "█" in shown


def test_the_report_shows_why_a_run_ended_early(run):
    console = Console(file=io.StringIO(), width=200)
    console.print(training_report(run, stopped_early="reward/mean reached 1"))
    assert "ended early: reward/mean reached 1" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_has_done_nothing_yet_can_be_reported(tmp_path):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(training_report(RunDirectory.create(tmp_path)))
    assert "0 training steps" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_counts_steps_without_learning_signal(run):
    MetricsWriter(run)(StepFinished(step=21, metrics={"groups/zero_variance_fraction": 1.0}))
    assert RunSummary.of(run).lessons == (
        "nothing learned in 1 of 21 steps: all attempts at each task scored the same",
    )

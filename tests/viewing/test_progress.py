from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agentfly.core.events import (
    CheckpointSaved,
    EvaluationFinished,
    EventStream,
    GenerationFinished,
    LeaseGranted,
    LeaseRequested,
    Progress,
    RewardFinished,
    RolloutFinished,
    RolloutsScheduled,
    RolloutStarted,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.viewing.progress import ConsoleProgress
from agentfly.viewing.run_state import RunState

TINY: dict[str, Any] = {"model": "tiny", "dtype": "float32", "device": "cpu"}


def a_run() -> list:
    def step(number: int) -> StepFinished:
        metrics = {"reward/mean": number / 4, "success/mean": number / 8, "turns/mean": 2.5}
        return StepFinished(time=100.0 + 10 * number, step=number, metrics=metrics)

    return [
        Progress(time=99.0, what="loading the model [tiny]"),
        TrainingStarted(time=100.0, run_dir="runs/x", steps=4, start_step=0, **TINY),
        EvaluationFinished(time=101.0, step=0, metrics={"success/mean": 0.25}),
        RolloutStarted(time=101.0, rollout_id="a", group_id="g", task_id="t"),
        RolloutStarted(time=101.0, rollout_id="b", group_id="g", task_id="t"),
        LeaseRequested(time=101.0, pool="container", owner="a", scope="rollout"),
        LeaseRequested(time=101.0, pool="container", owner="b", scope="rollout"),
        LeaseGranted(time=102.0, pool="container", owner="a", scope="rollout", instance="i", waited_seconds=1.0),
        GenerationFinished(time=105.0, rollout_id="a", turn=0, prompt_tokens=9, sampled_tokens=100, seconds=1.0),
        RolloutFinished(
            time=106.0,
            rollout_id="a",
            group_id="g",
            finish_reason="done",
            reward=1.0,
            turns=1,
            sampled_tokens=100,
            seconds=5,
        ),
        step(1),
        step(2),
        CheckpointSaved(time=121.0, step=2, path="runs/x/checkpoints/2"),
    ]


def shown(*, live: bool, events: list) -> str:
    console = Console(file=io.StringIO(), force_terminal=live, width=100, color_system=None)
    stream = EventStream()
    with ConsoleProgress(console, live=live) as progress, stream.subscribed(progress):
        for event in events:
            stream.emit(event)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_state_counts_running_waiting_and_remaining_rollouts():
    state = RunState()
    for event in a_run():
        state.update(event)
    assert (state.running, state.finished, state.waiting, state.failed) == (1, 1, 1, 0)
    assert state.rewards == [0.25, 0.5]
    assert state.seconds_left() == 2 * (9.0 + 10.0) / 2
    assert state.tokens_per_second(110.0) == 20.0
    assert state.tokens_per_second(200.0) == 0.0


def test_away_from_a_terminal_there_is_a_line_for_each_step_and_no_control_character():
    lines = shown(live=False, events=a_run()).splitlines()
    assert lines[0] == "loading the model [tiny]"
    assert lines[1] == "training 4 steps of tiny in float32 on cpu; files in runs/x"
    assert lines[2] == "held-out tasks after step 0  success 25%"
    assert lines[3].startswith("step 1/4  reward 0.250  success 12%  turns 2.5")
    assert lines[4].endswith("0:19 left")
    assert lines[5] == "checkpoint runs/x/checkpoints/2"
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_the_last_drawing_has_the_figures_and_a_curve():
    drawn = shown(live=True, events=[*a_run(), TrainingFinished(step=4, seconds=40.0)])
    last = drawn[drawn.rindex("step 2/4") :]
    assert "0.50" in last
    assert "▁█" in last
    assert "1 running, 1 waiting for a resource" in last
    assert "0:19 left" in last


@pytest.mark.parametrize("live", [False, True])
def test_a_run_reports_its_number_format_and_the_cost_of_fewer_bits(live):
    message = "bfloat16 rounds: log-probs differ a little between sampling and training"
    started: dict[str, Any] = {"run_dir": "runs/x", "steps": 4, "start_step": 0, "model": "tiny", "device": "cuda:0"}
    output = shown(live=live, events=[TrainingStarted(dtype="bfloat16", **started)])
    assert "tiny in bfloat16 on cuda:0" in output
    assert message in output
    assert message not in shown(live=live, events=[TrainingStarted(dtype="float32", **started)])


def test_a_long_action_is_reported_once_outside_a_terminal():
    events = [Progress(what="converting", done=part, total=3) for part in range(3)]
    assert shown(live=False, events=events) == "converting\n"


def test_a_step_without_learning_signal_is_reported_in_both_displays():
    events = [
        TrainingStarted(time=100.0, run_dir="runs/x", steps=1, start_step=0, **TINY),
        StepFinished(time=110.0, step=1, metrics={"groups/zero_variance_fraction": 1.0, "policy/grad_norm": 0.0}),
    ]
    lines = shown(live=False, events=events).splitlines()
    assert lines[0] == "training 1 step of tiny in float32 on cpu; files in runs/x"
    assert lines[2] == "  nothing learned: all attempts at each task scored the same"
    assert "nothing learned" in shown(live=True, events=events)


@pytest.mark.parametrize("live", [False, True])
def test_a_finished_run_reports_how_to_extend_it(live):
    events = [
        TrainingStarted(
            run_dir="runs/x", steps=4, start_step=4, further="to extend it, set a larger sft.epochs", **TINY
        ),
        TrainingFinished(step=4, seconds=0.1),
    ]
    output = shown(live=live, events=events)
    assert "already finished at step 4; to extend it, set a larger sft.epochs" in output
    assert "first step" not in output[output.rindex("already") :]


@pytest.mark.parametrize("live", [False, True])
def test_a_rollout_that_was_cancelled_has_not_finished(live):
    events = [RolloutsScheduled(time=100.0, total=3, recorded=0)]
    ends = (("a", "done", 1.0, None), ("b", "cancelled", None, None), ("c", "failed", None, "APIUnavailable: down"))
    for name, _, _, _ in ends:
        events.append(RolloutStarted(time=100.0, rollout_id=name, group_id="g", task_id="t"))  # type: ignore[arg-type]
    for name, finish, reward, error in ends:
        ended: dict[str, Any] = {
            "turns": 1,
            "sampled_tokens": 1,
            "seconds": 1.0,
            "finish_reason": finish,
            "reward": reward,
            "error": error,
        }
        events.append(RolloutFinished(time=140.0, rollout_id=name, group_id="g", **ended))  # type: ignore[arg-type]
    output = shown(live=live, events=events)
    assert "2 of 3 rollouts finished  reward 1.000  1 failed  1 cancelled" in output
    assert "3 of 3" not in output


@pytest.mark.parametrize("live", [False, True])
def test_a_run_that_ended_early_shows_the_reason_and_no_remaining_time(live):
    output = shown(live=live, events=[*a_run(), TrainingFinished(step=2, seconds=20.0, reason="the target is met")])
    assert "ended early, after step 2: the target is met" in output
    assert not live or " left" not in output[output.rindex("step 2/4") :]


def test_a_step_with_unscored_rollouts_shows_its_first_failure():
    metrics = {"rollouts": 8.0, "unscored": 4.0, "failures/reward/RewardError": 4.0, "reward/mean": 0.0}
    events = [
        TrainingStarted(run_dir="runs/x", steps=2, start_step=0, **TINY),
        *(RewardFinished(rollout_id=name, reward=None, seconds=0.1, error=f"No {name}.") for name in ("ink", "pen")),
        StepFinished(step=1, metrics=metrics),
        RewardFinished(rollout_id="r", reward=None, seconds=0.1, error="No\npaper."),
        StepFinished(step=2, metrics=metrics),
    ]
    lines = shown(live=False, events=events).splitlines()
    assert lines[2] == "  4 of 8 rollouts unscored: RewardError 4, for instance: No ink."
    assert lines[4] == "  4 of 8 rollouts unscored: RewardError 4, for instance: No paper."
    assert "8 of 16 rollouts unscored: RewardError 8, for instance: No ink." in " ".join(
        shown(live=True, events=events).split()
    )


def planned(total: int, recorded: int = 0, failed: tuple[int, ...] = ()) -> list:
    def finished(number: int) -> RolloutFinished:
        return RolloutFinished(
            time=100.0 + number,
            rollout_id=str(number),
            group_id="g",
            finish_reason="done",
            reward=None if number in failed else float(number % 2),
            turns=1,
            sampled_tokens=5,
            seconds=1.0,
            error="gone" if number in failed else None,
        )

    numbers = range(1, total - recorded + 1)
    starts = [RolloutStarted(time=100.0, rollout_id=str(one), group_id="g", task_id="t") for one in numbers]
    return [RolloutsScheduled(time=100.0, total=total, recorded=recorded), *starts, *map(finished, numbers)]


def test_rollouts_that_are_planned_have_a_line_at_each_tenth_with_mean_failures_and_time_left():
    lines = shown(live=False, events=planned(40, failed=(3,))).splitlines()
    assert lines[0] == "0 of 40 rollouts finished"
    assert lines[1] == "4 of 40 rollouts finished  reward 0.333  1 failed  0:36 left"
    assert lines[-1] == "40 of 40 rollouts finished  reward 0.487  1 failed"
    assert len(lines) == 11


def test_rollouts_on_record_count_as_finished_and_not_for_the_pace():
    lines = shown(live=False, events=planned(10, recorded=6)).splitlines()
    assert lines[:2] == ["6 of 10 rollouts finished", "7 of 10 rollouts finished  reward 1.000  0:03 left"]


def test_slow_rollouts_have_a_line_at_least_every_half_minute():
    quiet = [
        GenerationFinished(time=time, rollout_id="1", turn=0, prompt_tokens=1, sampled_tokens=1, seconds=1.0)
        for time in (110.0, 131.0, 140.0, 162.0)
    ]
    assert shown(live=False, events=[*planned(50)[:2], *quiet]).splitlines() == ["0 of 50 rollouts finished"] * 3


def test_planned_rollouts_are_shown_live_with_the_remaining_number():
    drawn = shown(live=True, events=planned(40)[:-10])
    assert "30 of 40 rollouts finished  reward 0.500" in drawn
    assert "10 running" in drawn

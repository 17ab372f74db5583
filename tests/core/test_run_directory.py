from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.events import EvaluationFinished, StepFinished
from agentfly.core.files import append_json_line, replace_text
from agentfly.core.run_directory import RunDirectory, whole_number
from agentfly.viewing.event_log import MetricsWriter


def test_runs_begun_in_the_same_second_get_directories_of_their_own(tmp_path):
    paths = {RunDirectory.create(tmp_path).path for _ in range(5)}
    assert len(paths) == 5
    assert all(path.is_dir() for path in paths)


def test_a_name_that_holds_a_run_is_refused_and_the_message_says_how_to_go_on_with_it(tmp_path):
    run = RunDirectory.create(tmp_path, "my run")
    run.metrics_file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"--resume '.*my run'"):
        RunDirectory.create(tmp_path, "my run")


@pytest.mark.parametrize(
    "file", ["config.yaml", "metrics.jsonl", "trajectories/eval-000000.jsonl", "checkpoints/step-000002/config.json"]
)
def test_whatever_a_run_has_kept_makes_its_directory_used(tmp_path, file):
    path = tmp_path / "mine" / file
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert RunDirectory(tmp_path / "mine").holds_run
    with pytest.raises(ConfigError, match=r"--resume .*mine"):
        RunDirectory.create(tmp_path, "mine")


def test_what_a_refused_start_leaves_behind_is_no_run(tmp_path):
    run = RunDirectory.create(tmp_path, "mine")
    run.events_file.write_text("{}\n")
    run.tensorboard.mkdir()
    run.checkpoints.mkdir()
    assert not RunDirectory.create(tmp_path, "mine").holds_run


def test_a_directory_is_removed_only_while_no_run_has_begun_in_it(tmp_path):
    refused, begun, others = (RunDirectory.create(tmp_path) for _ in range(3))
    for run in (refused, begun, others):
        run.events_file.write_text("{}\n")
    begun.trajectories_file(1).write_text("{}\n")
    (others.path / "notes.txt").write_text("mine")
    for run in (refused, begun, others):
        run.remove_unless_begun()
    assert not refused.path.exists()
    assert begun.events_file.exists()
    assert (others.path / "notes.txt").exists()


def test_rollouts_that_wait_in_the_journal_keep_the_events_that_tell_of_them(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.events_file.write_text("{}\n")
    run.journal.mkdir()
    (run.journal / "train-0.jsonl").write_text("{}\n")
    run.remove_unless_begun()
    assert run.events_file.exists()


def test_a_file_in_the_way_of_a_run_is_a_message(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="in the way"):
        RunDirectory(tmp_path / "mine").ensure()


def test_a_directory_that_may_not_be_written_is_a_message(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)  # root, who runs the tests in places, may write anywhere
    with pytest.raises(PrerequisiteError, match="run_dir"):
        RunDirectory.create(tmp_path)


def test_metrics_are_read_back_in_the_order_of_the_steps_by_kind(tmp_path):
    run = RunDirectory.create(tmp_path)
    write = MetricsWriter(run)
    write(EvaluationFinished(step=0, metrics={"success/mean": 0.25}))
    for step in (1, 2, 3):
        write(StepFinished(step=step, metrics={"reward/mean": step / 10}))
    assert [(row.step, row.values) for row in run.metrics()] == [
        (1, {"reward/mean": 0.1}),
        (2, {"reward/mean": 0.2}),
        (3, {"reward/mean": 0.3}),
    ]
    assert [row.values for row in run.metrics("eval")] == [{"success/mean": 0.25}]


def test_a_line_cut_by_a_crash_costs_that_line_only_and_a_resumed_step_counts_once(tmp_path):
    run = RunDirectory.create(tmp_path)
    write = MetricsWriter(run)
    write(StepFinished(step=1, metrics={"reward/mean": 0.1}))
    write(StepFinished(step=2, metrics={"reward/mean": 0.2}))
    whole = run.metrics_file.read_bytes()
    run.metrics_file.write_bytes(whole[:-9])
    assert [row.step for row in run.metrics()] == [1]

    write(StepFinished(step=2, metrics={"reward/mean": 0.5}))
    write(StepFinished(step=3, metrics={"reward/mean": 0.6}))
    assert [row.values["reward/mean"] for row in run.metrics()] == [0.1, 0.5, 0.6]


def test_a_number_that_is_not_finite_is_left_out_and_the_rest_of_the_step_kept(tmp_path):
    run = RunDirectory.create(tmp_path)
    MetricsWriter(run)(StepFinished(step=1, metrics={"kl": float("nan"), "reward/mean": 1.0}))
    assert [row.values for row in run.metrics()] == [{"reward/mean": 1.0}]


def test_a_file_that_cannot_be_replaced_is_as_it_was_and_the_message_names_the_cure(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_text(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PrerequisiteError, match=r"config\.yaml cannot be written: No space left on device.*Free some"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("000012", 12), ("", None), ("²", None), ("٣", None), ("-1", None), ("1.0", None), ("9" * 5000, None)],
)
def test_only_a_text_of_digits_is_a_whole_number(text, number):
    assert whole_number(text) == number


def test_files_of_trajectories_are_listed_by_step(tmp_path):
    run = RunDirectory.create(tmp_path)
    for step in (100, 9, 20):
        run.trajectories_file(step, "eval").write_text("")
    run.trajectories_file(1, "train").write_text("")
    assert [step for step, _ in run.trajectory_files("eval")] == [9, 20, 100]


def metrics(run: RunDirectory, kind: str, **values: float) -> None:
    append_json_line(run.metrics_file, {"kind": kind, "step": 0, "time": 0.0, "metrics": values})


def test_a_run_knows_which_command_has_begun_it(tmp_path):
    runs = {name: RunDirectory.create(tmp_path, name) for name in ("train", "sft", "eval", "rollout", "early", "none")}
    metrics(runs["train"], "eval", **{"success/mean": 0.5})
    runs["train"].trajectories_file(0, "eval").write_text("{}\n")
    metrics(runs["sft"], "eval", **{"sft/held_out_loss": 0.5})
    runs["eval"].trajectories_file(3, "eval").write_text("{}\n")
    runs["rollout"].trajectories_file(0, "rollout").write_text("{}\n")
    runs["early"].journal.mkdir()
    runs["none"].events_file.write_text("{}\n")
    begun_by = {name: run.begun_by for name, run in runs.items()}
    assert begun_by == {**{name: name for name in ("train", "sft", "eval", "rollout")}, "early": "train", "none": None}
    with pytest.raises(ConfigError, match="agentfly sft --resume"):
        runs["sft"].require_unused()


def test_of_a_run_that_has_not_begun_the_directories_above_go_too_that_were_made_for_it(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "today", "mine")
    run.remove_unless_begun()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    RunDirectory.create(tmp_path / "runs").remove_unless_begun()
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_name_that_no_directory_can_have_is_refused_with_the_cure(tmp_path, name) -> None:
    with pytest.raises(PrerequisiteError, match=r"cannot be created.*run_dir="):
        RunDirectory(tmp_path / name).ensure()

"""``agentfly compare``: two stored evaluations are found and compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.core.trajectory import FinishReason, Trajectory, save_trajectories


def evaluation(run: RunDirectory, step: int, *rewards: float | None) -> Path:
    path = run.ensure().trajectories_file(step, "eval")
    save_trajectories(
        [
            Trajectory(
                f"r{n}", f"g{n}", Task(f"go {n}", id=f"task-{n}"), finish_reason=FinishReason.DONE, reward=reward
            )
            for n, reward in enumerate(rewards)
        ],
        path,
    )
    return path


@pytest.fixture
def compare(agentfly):
    return partial(agentfly, "compare")


def test_a_run_is_compared_with_itself_before_training(compare, tmp_path):
    run = RunDirectory(tmp_path / "run")
    first = evaluation(run, 0, 0.0, 0.0, 1.0)
    evaluation(run, 10, 1.0, 1.0, 1.0)
    last = evaluation(run, 20, 1.0, 0.0, 1.0)
    code, out = compare(run.path, "--json")
    output = json.loads(out)
    assert code == 0
    assert output["files"] == [str(first), str(last)]
    assert output["reward"]["wins"] == 1
    assert output["reward"]["difference"]["mean"] == pytest.approx(1 / 3)


def test_two_runs_are_compared_and_excluded_tasks_are_counted(compare, tmp_path):
    evaluation(RunDirectory(tmp_path / "one"), 0, 0.0, None, 1.0, 0.5)
    evaluation(RunDirectory(tmp_path / "other"), 0, 1.0, 0.25, 1.0)
    code, out = compare(tmp_path / "one", tmp_path / "other")
    assert code == 0
    assert "2 tasks compared" in out
    assert "1 task left out, without a score in one of them" in out
    assert "1 task left out, in first only" in out
    assert "task-0" in out
    assert "+1" in out


def test_intervals_of_differences_of_shares_stay_within_minus_one_and_one(compare, tmp_path):
    evaluation(RunDirectory(tmp_path / "one"), 0, 0.0, 0.0, 1.0)
    evaluation(RunDirectory(tmp_path / "other"), 0, 1.0, 1.0, 1.0)
    _, out = compare(tmp_path / "one", tmp_path / "other", "--json")
    for number in ("reward", "success"):
        difference = json.loads(out)[number]["difference"]
        assert -1 <= difference["low"] < difference["mean"] < difference["high"] <= 1


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["empty"], "has no evaluation"),
        (["once"], "has one evaluation"),
    ],
)
def test_sources_that_cannot_be_compared_are_reported(compare, tmp_path, monkeypatch, words, output):
    monkeypatch.chdir(tmp_path)
    RunDirectory("empty").ensure()
    evaluation(RunDirectory("once"), 0, 1.0)
    code, out = compare(*words)
    assert code == 2
    assert output in out


def test_a_file_of_another_kind_is_not_reported_as_damaged_trajectories(compare, tmp_path):
    (tmp_path / "config.yaml").write_text("agent: a:b\n")
    code, out = compare(evaluation(RunDirectory(tmp_path / "one"), 0, 1.0), tmp_path / "config.yaml")
    assert code == 2
    assert "line 1: It is not JSON" in out
    assert "Name a file of trajectories" in out
    assert "Remove the line" not in out

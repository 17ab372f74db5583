"""``agentfly init``: a project under any name that works unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.cli.config_file import load_config
from agentfly.cli.experiment import Experiment
from agentfly.cli.init import FILES, TEMPLATE, module_name, new_project
from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory
from agentfly.viewing.report import RunSummary


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("my-task", "my_task"),
        ("Größer als 2", "groer_als_2"),
        ("2048", "task_2048"),
        ("json", "json_task"),
        ("class", "class_task"),
        ("print", "print_task"),
        ("agentfly", "agentfly_task"),
        ("..weird--name..", "weird_name"),
    ],
)
def test_any_name_with_a_letter_or_a_digit_gives_a_module_that_shadows_nothing(name, module):
    assert module_name(name) == module
    assert module.isidentifier()


def test_a_name_without_any_is_refused():
    with pytest.raises(ConfigError, match="Choose another name"):
        module_name("日本")


def test_the_template_contains_exactly_the_written_files():
    there = {path.name for path in TEMPLATE.iterdir() if path.name not in ("__pycache__", ".pytest_cache", "runs")}
    assert there == set(FILES)


def test_a_project_is_written_under_its_own_name(tmp_path):
    written = new_project(tmp_path / "look-up")
    assert {path.name for path in written} == {"README.md", "config.yaml", "look_up.py", "test_look_up.py"}
    for path in written:
        text = path.read_text()
        assert "my_task" not in text
        assert "my-task" not in text
    experiment = Experiment.load(load_config(tmp_path / "look-up" / "config.yaml"))
    experiment.check_definitions([*experiment.tasks, *experiment.eval_tasks])
    assert experiment.oracle is not None


@pytest.mark.parametrize("name", [".", "other/"])
def test_an_empty_directory_that_is_there_is_taken(tmp_path, monkeypatch, name):
    home = tmp_path / "here"
    (home / "other").mkdir(parents=True)
    monkeypatch.chdir(home if name != "." else home / "other")
    new_project(Path(name))
    assert (home / "other" / "other.py").is_file()


def test_existing_files_are_never_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty: it contains notes.txt"):
        new_project(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        new_project(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_new_project_passes_check_trains_and_passes_its_tests(tmp_path):
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=home if home.exists() else tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "AGENTFLY_STATE_DIR": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    home = tmp_path / "look-up"
    output = run("agentfly.cli.main", "init", "look-up")
    assert "cd look-up\n  agentfly check config.yaml\n" in output
    assert "FAILED" not in run("agentfly.cli.main", "check", "config.yaml")
    # As it stands it takes a minute; a few steps show the same.
    run("agentfly.cli.main", "train", "config.yaml", "training.steps=3", "run_dir=runs/first")
    assert "passed" in run("pytest", "-q", "-p", "no:cacheprovider")
    summary = RunSummary.of(RunDirectory(home / "runs" / "first"))
    assert summary.steps == 3
    assert summary.success_after is not None
    assert "tasks compared" in run("agentfly.cli.main", "compare", "runs/first")

"""Interrupted runs of ``agentfly train`` and ``agentfly sft``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from agentfly.cli.command_run import CommandRun, save_config_on_start
from agentfly.cli.config_file import RunConfig
from agentfly.core.errors import PrerequisiteError
from agentfly.core.events import EventStream, TrainingStarted
from agentfly.core.run_directory import RunDirectory

CONFIG = RunConfig(agent="here.py:agent", tasks="tasks.jsonl")


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, SystemExit])
def test_a_stopped_run_has_stored_its_configuration_and_reports_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped_by: type[BaseException]
) -> None:
    run, events = RunDirectory(tmp_path / "my run").ensure(), EventStream()

    def begin() -> None:
        with save_config_on_start(CONFIG, None, events, command="sft", sources="runs/oracle"):
            where: dict[str, Any] = {"run_dir": str(run.path), "model": "tiny", "dtype": "float32", "device": "cpu"}
            events.emit(TrainingStarted(steps=2, start_step=0, **where))
            raise stopped_by

    with pytest.raises(stopped_by):
        begin()
    assert yaml.safe_load(run.config_file.read_text())["agent"] == CONFIG.agent
    assert f"to continue: agentfly sft --resume '{run.path}' runs/oracle" in capsys.readouterr().err


def test_a_run_that_cannot_store_its_configuration_does_not_start(tmp_path: Path) -> None:
    run, events = RunDirectory(tmp_path).ensure(), EventStream()
    run.config_file.mkdir()
    started_run = TrainingStarted(run_dir=str(tmp_path), model="tiny", dtype="", device="cpu", steps=2, start_step=0)
    with (
        save_config_on_start(CONFIG, None, events, command="train"),
        pytest.raises(PrerequisiteError, match=r"config\.yaml"),
    ):
        events.emit(started_run)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_rollouts_that_are_stopped_name_a_command_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Literal["eval", "rollout"]
) -> None:
    kept = CommandRun(CONFIG.model_copy(update={"run_dir": str(tmp_path / "it's a run")}), 0, command, None)
    run = RunDirectory(tmp_path / "it's a run")

    def stopped() -> None:
        with kept.open_directory(command):
            run.trajectories_file(0, command).touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    output = capsys.readouterr().err.partition("to continue: ")[2]
    assert shlex.split(output) == ["agentfly", command, "--resume", str(run.path)]


def test_a_run_stopped_before_its_start_names_no_run_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), save_config_on_start(CONFIG, None, EventStream(), command="train"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""

"""A run of agentfly train or agentfly sft that is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentfly.cli.begun_run import begun_run
from agentfly.cli.config_file import RunConfig
from agentfly.events import EventStream, TrainingStarted
from agentfly.run_directory import RunDirectory

CONFIG = RunConfig(agent="here.py:agent", tasks="tasks.jsonl")


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, SystemExit])
def test_a_run_that_is_stopped_has_kept_its_configuration_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped_by: type[BaseException]
) -> None:
    run, events = RunDirectory(tmp_path / "my run").ensure(), EventStream()

    def begin() -> None:
        with begun_run(CONFIG, None, events, command="sft", sources="runs/oracle"):
            where = {"run_dir": str(run.path), "model": "tiny", "dtype": "float32", "device": "cpu"}
            events.emit(TrainingStarted(steps=2, start_step=0, **where))
            raise stopped_by

    with pytest.raises(stopped_by):
        begin()
    assert yaml.safe_load(run.config_file.read_text())["agent"] == CONFIG.agent
    assert f"to go on: agentfly sft --resume '{run.path}' runs/oracle" in capsys.readouterr().err


def test_a_new_run_that_is_stopped_before_it_has_begun_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), begun_run(CONFIG, None, EventStream(), command="train"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""

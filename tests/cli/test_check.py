"""``agentfly check``, its quick part before other commands, and resumed rollouts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentfly.cli import main as cli
from agentfly.cli.command_run import CommandRun
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories

PROJECT = '''
from typing import Annotated
import agentfly as af

@af.tool
def look(item: str, level: Annotated[str, af.FromTask()]) -> str:
    """Look at an item.

    Args:
        item: the item.
    """
    return level

@af.reward
def short(response: str) -> float:
    return float(response == "Low.")

agent = af.Agent(model="tiny", tools=[look], max_turns=2, max_tokens_per_turn=64)
tasks = [{"prompt": f"Go {number}.", "level": "low"} for number in range(4)]
held_out = [{"prompt": f"Stay {number}.", "level": "low"} for number in range(2)]
lacking = [{"prompt": "Go.", "levels": "low"}]

def oracle(tool_call_format):
    return [tool_call_format.write("look", {"item": "tea"}), "Low."]
'''
CONFIG = """
agent: mine.py:agent
tasks: mine.py:tasks
eval_tasks: mine.py:held_out
reward: mine.py:short
oracle: mine.py:oracle
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(PROJECT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def agentfly(monkeypatch, capsys):
    """Run a command; answers its exit code, its standard output and its standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.slow
def test_each_thing_that_a_run_needs_has_a_line_and_works(agentfly):
    code, out, _ = agentfly("check", "config.yaml")
    assert code == 0
    assert all(line.startswith("ok ") for line in out.splitlines())
    for what in ("tool look", "rollout of the oracle", "calls of look", "score of short", "model tiny", "generation"):
        assert what in out
    assert "1 for the oracle" in out
    assert "0 for an agent that does nothing" in out


@pytest.mark.slow
def test_a_reward_for_doing_nothing_is_in_doubt_and_the_command_goes_well(agentfly, project):
    (project / "mine.py").write_text(PROJECT.replace('response == "Low."', "True"))
    code, out, _ = agentfly("check", "config.yaml")
    assert code == 0
    [doubt] = [line for line in out.splitlines() if not line.startswith("ok ")]
    assert doubt.startswith("doubt   score of short for an idle agent  1 for an agent that does nothing")


@pytest.mark.slow
def test_held_out_tasks_that_are_trained_on_are_in_doubt(agentfly):
    code, out, _ = agentfly("check", "config.yaml", "eval_tasks=mine.py:tasks")
    assert code == 0
    [doubt] = [line for line in out.splitlines() if not line.startswith("ok ")]
    assert doubt.startswith("doubt   held-out tasks  4 of 4 held-out tasks are among the tasks that are trained on")


def test_held_out_tasks_are_looked_at_as_those_that_are_trained_on(agentfly):
    code, out, _ = agentfly("check", "config.yaml", "eval_tasks=mine.py:lacking")
    assert code == 1
    assert "the field 'level', which 1 of 5 tasks do not have" in out


def test_failed_checks_have_a_remedy_and_the_command_fails(agentfly):
    code, out, err = agentfly("check", "config.yaml", "tasks=mine.py:lacking")
    assert code == 1
    assert "FAILED  tool look  The tool 'look' takes the field 'level', which 1 of 3 tasks do not have" in out
    assert "1 of these checks failed" in err


@pytest.mark.parametrize("words", [["train"], ["rollout"], ["eval", "eval_tasks=mine.py:lacking"]])
def test_other_commands_check_definitions_before_they_start_and_leave_no_directory(agentfly, words):
    command, *others = words
    code, _, err = agentfly(command, "config.yaml", "tasks=mine.py:lacking", *others)
    assert code == 2
    assert "tool look: The tool 'look' takes the field 'level'" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize("oracle", ["mine.py:tasks", "mine.py:agent"])
def test_an_object_that_is_not_an_oracle_is_refused(agentfly, oracle):
    code, _, err = agentfly("check", "config.yaml", f"oracle={oracle}")
    assert code == 2
    assert "It must be a list of texts" in err


@pytest.mark.slow
def test_interrupted_rollouts_resume_with_the_requested_tasks_and_attempts(agentfly):
    code, _, _ = agentfly("rollout", "config.yaml", "-n", "2", "-k", "3", "-q", "run_dir=runs/mine")
    assert code == 0
    path = RunDirectory("runs/mine").trajectories_file(0, "rollout")
    before = list(load_trajectories(path))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b'{"torn')
    code, out, _ = agentfly("rollout", "--resume", "runs/mine")
    assert code == 0
    assert "6 rollouts" in out
    after = list(load_trajectories(path))
    assert [one.rollout_id for one in after] == [one.rollout_id for one in before]
    assert [one.sequences[0].ids for one in after] == [one.sequences[0].ids for one in before]
    code, _, err = agentfly("rollout", "--resume", "runs/mine", "-q", "training.temperature=0.5")
    assert code == 2
    assert "the sampling's temperature was 1.0 and is now 0.5" in err
    assert "stopped; to go on" not in err
    assert "temperature: null" in RunDirectory("runs/mine").config_file.read_text()


def test_runs_that_cannot_be_resumed_are_refused(agentfly):
    for command in ("rollout", "eval"):
        code, _, err = agentfly(command, "--resume", "nowhere")
        assert code == 2
        assert "nowhere has no run to resume" in err
        code, _, err = agentfly(command)
        assert code == 2
        assert "--resume RUN_DIR" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_stopped_run_reports_how_to_resume_and_leaves_nothing_if_no_rollout_finished(capsys, error):
    kept = CommandRun.parse("rollout", Path("config.yaml"), ["run_dir=runs/mine"], None, None)

    def stop(finished):
        with kept.open_directory("rollout") as run:
            if finished:
                run.trajectories_file(0, "rollout").write_text("{}\n")
            raise error

    with pytest.raises(error):
        stop(finished=False)
    assert "--resume" not in capsys.readouterr().err
    assert not Path("runs/mine").exists()
    with pytest.raises(error):
        stop(finished=True)
    assert "stopped; to continue: agentfly rollout --resume runs/mine" in capsys.readouterr().err
    assert RunDirectory("runs/mine").config_file.is_file()

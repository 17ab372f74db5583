"""``agentfly rescore``: new scores next to the old ones."""

from __future__ import annotations

import asyncio
import sys

import pytest

import agentfly as af
from agentfly.cli import main as cli
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories, save_trajectories

REWARDS = """
import agentfly as af

@af.reward
def longer(response: str, least: int) -> float:
    if len(response) < least:
        raise ValueError("too short to tell")
    return float(len(response))

@af.group_reward
def first_wins(responses: list[str]) -> list[float]:
    return [1.0] + [0.0] * (len(responses) - 1)

@af.reward
def broken() -> float:
    return {}["x"]

not_a_reward = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunDirectory:
    """A run with two stored attempts at each of two tasks, in one file per task."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "go"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    run = RunDirectory("runs/mine").ensure()
    one = af.reward(name="one")(lambda: 1.0)
    for step, least in ((1, 0), (2, 9)):
        task = {"prompt": "go", "least": least}
        policy = af.ScriptedPolicy(["four"] if step == 1 else lambda prompt, turn: "123456789")
        result = asyncio.run(af.run(af.Agent(model="scripted"), [task], reward=one, attempts=2, policy=policy))
        save_trajectories(result.trajectories, run.trajectories_file(step))
    return run


@pytest.fixture
def agentfly(run, monkeypatch, capsys):
    """Run a command; answers its exit code, standard output and standard error."""

    def command(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return command


def rewards(path):
    return [trajectory.reward for trajectory in load_trajectories(path)]


def test_new_scores_are_written_beside_the_old_ones_and_compared(agentfly, run):
    old = {path: path.read_bytes() for path in run.saved_trajectories()}
    code, out, err = agentfly("rescore", "runs/mine", "--reward", "my_rewards:longer")
    assert code in (0, None), err
    assert {path: path.read_bytes() for path in run.saved_trajectories()} == old
    assert rewards(run.trajectories / "train-000001.longer.jsonl") == [4.0, 4.0]
    assert rewards(run.trajectories / "train-000002.longer.jsonl") == [9.0, 9.0]
    lines = [line.split("│")[1:-1] for line in out.splitlines() if "train-" in line and "│" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["train-000001", "2", "2", "1 over 2 scored", "4 over 2 scored", "0"],
        ["train-000002", "2", "2", "1 over 2 scored", "9 over 2 scored", "0"],
    ]

    agentfly("rescore", "runs/mine", "--reward", "my_rewards.py:longer")
    assert rewards(run.trajectories / "train-000001.longer-2.jsonl") == [4.0, 4.0]
    assert len(run.saved_trajectories()) == 2, "the run's own files are told from those that were scored anew"


def test_a_file_is_ranked_and_written_elsewhere(agentfly, run, tmp_path):
    path = str(run.trajectories_file(1))
    code, _, err = agentfly("rescore", path, "--reward", "my_rewards:first_wins", "--out", "elsewhere/ranked")
    assert code in (0, None), err
    assert rewards(tmp_path / "elsewhere/ranked/train-000001.first_wins.jsonl") == [1.0, 0.0]


def test_unscored_trajectories_are_counted_by_cause(agentfly, run):
    trajectories = list(load_trajectories(run.trajectories_file(2)))
    trajectories[0].task.fields["least"] = 100  # type: ignore[index]
    save_trajectories(trajectories, "some.jsonl")
    _, out, _ = agentfly("rescore", "some.jsonl", "--reward", "my_rewards:longer")
    assert "9 over 1 scored" in out
    assert "1 reward/RewardError" in out
    assert rewards("some.longer.jsonl") == [None, 9.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/none", "--reward", "my_rewards:longer"], "runs/none does not exist"),
        (["runs", "--reward", "my_rewards:longer"], "runs has no trajectories"),
        (["tasks.jsonl", "--reward", "my_rewards:longer"], "tasks.jsonl, line 1: This is no trajectory"),
        (["runs/mine", "--reward", "my_rewards:long"], "Did you mean 'longer'?"),
        (["runs/mine", "--reward", "my_rewards:not_a_reward"], "is an int, not a reward"),
        (["runs/mine", "--reward", "my_rewards:broken"], "gave none of 2 trajectories a score, so nothing was written"),
    ],
)
def test_trajectories_that_cannot_be_rescored_are_reported_and_nothing_is_written(agentfly, run, words, message):
    code, _, err = agentfly("rescore", *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert len(list(run.trajectories.iterdir())) == 2

"""The commands that run an agent, on a small project of a user."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfly.cli import main as cli
from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories

PROJECT = '''
import agentfly as af

@af.tool
def look(item: str) -> str:
    """Look at an item.

    Args:
        item: the item.
    """
    return f"{item}: low"

@af.reward
def short(response: str, limit: int) -> float:
    return 1.0 / (1.0 + max(0, len(response) - limit))

def agent(model: str) -> af.Agent:
    return af.Agent(model=model, tools=[look], max_turns=2, max_tokens_per_turn=16)

def train_tasks():
    return [{"prompt": f"What about {item}?", "limit": 4} for item in ("tea", "eggs", "rice", "milk")]
'''
CONFIG = {
    "agent": "workshop.py:agent",
    "model": "tiny",
    "tasks": "workshop.py:train_tasks",
    "eval_tasks": "held_out.jsonl",
    "reward": "workshop:short",
    "training": {"steps": 2, "tasks_per_step": 2, "attempts": 2, "checkpoint_every_steps": 1, "seed": 3},
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A configuration names files relative to itself, not to the working directory."""
    home = tmp_path / "project"
    home.mkdir()
    (home / "workshop.py").write_text(PROJECT)
    (home / "held_out.jsonl").write_text('{"prompt": "What about soap?", "limit": 4}\n')
    (home / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delitem(sys.modules, "workshop", raising=False)
    return home


@pytest.fixture
def agentfly(project, monkeypatch, capsys):
    """Run a command that succeeds; answers its standard output and standard error."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        assert left.value.code in (0, None), captured.err
        return captured.out, captured.err

    return run


@pytest.mark.slow
def test_a_run_is_trained_resumed_and_evaluated(agentfly, project):
    out, err = agentfly("train", "project/config.yaml", "run_dir=runs/mine")
    assert "2 training steps" in out
    assert "agentfly eval runs/mine\n  agentfly rollout runs/mine -n 2\n  agentfly export runs/mine --to DIR\n" in out
    assert "agentfly train --resume runs/mine training.steps=4\n  tensorboard --logdir runs/mine/tensorboard" in out
    assert "step 2/2" in err
    run = RunDirectory("runs/mine")
    assert [row.step for row in run.metrics()] == [1, 2]
    assert [row.step for row in run.metrics("eval")] == [0, 2]
    assert yaml.safe_load(run.config_file.read_text())["training"]["seed"] == 3

    _, err = agentfly("train", "--resume", "runs/mine")
    assert "already finished at step 2" in err
    agentfly("train", "--resume", "runs/mine", "training.steps=3")
    assert [row.step for row in run.metrics()] == [1, 2, 3]
    assert yaml.safe_load(run.config_file.read_text())["training"]["steps"] == 3

    out, _ = agentfly("eval", "runs/mine", "run_dir=runs/last")
    assert "step-000003" in out
    (evaluated,) = load_trajectories(RunDirectory("runs/last").trajectories_file(3, "eval"))
    assert evaluated.task["limit"] == 4
    out, _ = agentfly("eval", "runs/mine", "--checkpoint", "none", "run_dir=runs/first")
    assert "1 held-out task, tiny" in out
    out, _ = agentfly("eval", "runs/mine", "--checkpoint", "step-000003", "run_dir=runs/named")
    assert "step-000003" in out

    agentfly("rollout", "runs/mine", "-n", "1", "run_dir=runs/shown")
    shown = RunDirectory("runs/shown")
    assert shown.trajectories_file(3, "rollout").is_file()
    assert yaml.safe_load(shown.config_file.read_text())["model"].endswith("step-000003")


@pytest.mark.slow
def test_rollouts_are_shown_and_kept(agentfly):
    out, _ = agentfly("rollout", "project/config.yaml", "-n", "2", "-k", "3", "run_dir=runs/mine")
    assert out.count("What about tea?") == 3
    trajectories = list(load_trajectories(RunDirectory("runs/mine").trajectories_file(0, "rollout")))
    assert [(trajectory.task.prompt, trajectory.attempt) for trajectory in trajectories] == [
        (f"What about {item}?", attempt) for item in ("tea", "eggs") for attempt in range(3)
    ]
    out, err = agentfly("rollout", "project/config.yaml", "-n", "1", "--quiet", "run_dir=runs/quiet")
    assert out == f"{RunDirectory('runs/quiet').trajectories_file(0, 'rollout')}\n"
    assert err == ""


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_command_that_fails_before_the_first_rollout_leaves_no_run(project, monkeypatch, capsys, command):
    with socket.socket() as nobody:  # bound, and listened at by nobody
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        monkeypatch.setattr(sys, "argv", ["agentfly", command, "project/config.yaml", "--base-url", url])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 1
    assert "nobody could be reached" in capsys.readouterr().err
    assert list(Path("runs").glob("*")) == []


@pytest.mark.slow
def test_rollouts_repeat_under_the_same_seed_only(agentfly):
    def sampled(name: str, seed: int) -> list[int]:
        agentfly(
            "rollout",
            "project/config.yaml",
            "-n",
            "1",
            "-k",
            "4",
            "-q",
            f"run_dir=runs/{name}",
            f"training.seed={seed}",
        )
        trajectories = load_trajectories(RunDirectory(f"runs/{name}").trajectories_file(0, "rollout"))
        return [token for trajectory in trajectories for token in trajectory.sequences[0].ids]

    assert sampled("a", 1) == sampled("b", 1) != sampled("c", 2)


def test_the_demo_trains_the_model_with_the_seed_and_in_the_directory_that_are_asked_for(agentfly, monkeypatch):
    configured: list[Any] = []
    monkeypatch.setattr("agentfly.cli.train.run_training", configured.append)
    _, report = agentfly("demo", "--seed", "4", "--run-dir", "runs/demo")
    assert "0.4 for checking the shelf asked for" in report
    agentfly("demo", "--model", "smollm2-135m")
    tiny, smollm2 = configured
    assert (tiny.model, tiny.training.seed, tiny.run_dir) == ("tiny", 4, "runs/demo")
    assert (smollm2.model, smollm2.training.seed, smollm2.run_dir) == ("smollm2-135m", 1, None)
    for config in configured:
        assert config.eval_tasks is not None


def test_models_are_listed_and_found(agentfly):
    assert "tiny" in agentfly("models", "list")[0]
    path = Path(agentfly("models", "path", "tiny")[0].strip())
    assert (path / "config.json").is_file()
    assert agentfly("models", "get", "tiny")[0].strip() == str(path)


def test_reap_reports_that_nothing_is_left(agentfly):
    assert agentfly("resources", "reap") == ("nothing was left behind\n", "")


@pytest.mark.slow
def test_a_refused_run_can_start_again_in_the_same_directory(agentfly, project, monkeypatch, capsys):
    words = ["train", "project/config.yaml", "run_dir=runs/mine", "training.steps=1"]
    (project / "workshop.py").write_text(PROJECT.replace("max_turns=2", "max_turns=2, top_p=0.5"))
    monkeypatch.setattr(sys, "argv", ["agentfly", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert "top_p" in capsys.readouterr().err
    assert not Path("runs").exists()
    (project / "workshop.py").write_text(PROJECT)
    for name in [name for name in sys.modules if name.startswith("workshop")]:
        monkeypatch.delitem(sys.modules, name)
    out, _ = agentfly(*words)
    assert "1 training step\n" in out


@pytest.mark.slow
def test_an_agent_is_evaluated_against_an_endpoint_where_torch_is_not_installed(project, capfd):
    """A program of its own, in which nothing of the packages for training can be imported."""
    program = """
import asyncio, sys
from pathlib import Path

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "numpy", "accelerate", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from agentfly.cli import main as cli
from agentfly.core.errors import ConfigError
from agentfly.testing.fake_openai_server import FakeOpenAIServer, text_reply

async def serve():
    async with FakeOpenAIServer() as far_side:
        far_side.default_reply = text_reply("low")
        asking = asyncio.to_thread(evaluate, far_side.url)
        await asking

def evaluate(url):
    words = ["eval", sys.argv[1], "--base-url", url, "policy.model=m", "run_dir=runs/far"]
    cli.app(words, standalone_mode=False)

asyncio.run(serve())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(project / "config.yaml")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (trajectory,) = load_trajectories(RunDirectory(Path("runs/far")).trajectories_file(0, "eval"))
    assert trajectory.response == "low"
    assert trajectory.reward == 1.0
    assert "usage/prompt_tokens" in done.stdout
    assert trajectory.turns[0].prompt_tokens > 0
    assert trajectory.turns[0].sampled_tokens > 0


def test_an_endpoint_cannot_be_trained(project):
    with pytest.raises(ConfigError, match="cannot be trained from here"):
        cli.app(["train", str(project / "config.yaml"), "policy.base_url=http://localhost:1/v1"], standalone_mode=False)


@pytest.fixture
def held_out(project):
    """A configuration without tasks to train on, and with three held-out ones; its model is played by the oracle."""
    rows = [{"prompt": f"look at {number}", "limit": 4} for number in range(3)]
    (project / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {**CONFIG, "eval_tasks": "three.jsonl", "policy": "oracle", "oracle": "workshop.py:oracle"}
    del config["tasks"]
    (project / "three.yaml").write_text(yaml.safe_dump(config))
    (project / "workshop.py").write_text(PROJECT + '\noracle = ["low"]\n')
    return "project/three.yaml"


def test_some_held_out_tasks_are_evaluated_without_any_to_train_on_and_shown_again(agentfly, held_out):
    out, err = agentfly("eval", held_out, "-n", "2", "run_dir=runs/two")
    assert "2 of 2 rollouts finished" in err
    assert "2 held-out tasks, the oracle" in out
    assert "pass@1" in out
    again, err = agentfly("eval", "runs/two", "--stored")
    assert err == ""
    assert again.splitlines()[0] == out.splitlines()[0]
    assert again[again.index("over the tasks") :] == out[out.index("over the tasks") :]
    as_json, _ = agentfly("eval", "runs/two", "--stored", "--json")
    assert len(json.loads(as_json)["tasks"]) == 2


@pytest.mark.parametrize(
    ("words", "report"),
    [
        (["rollout"], "names no tasks"),
        (["train", "policy=null"], "names no tasks"),
    ],
)
def test_a_command_without_configured_tasks_reports_it(held_out, words, report):
    with pytest.raises(ConfigError, match=report):
        cli.app([words[0], held_out, *words[1:]], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "report"),
    [
        (["project"], "project has no evaluation"),
        ([], "--stored takes the directory of a run"),
        (["project", "seed=1"], "--stored takes the directory of a run"),
    ],
)
def test_a_missing_evaluation_cannot_be_shown(project, words, report):
    with pytest.raises(ConfigError, match=report):
        cli.app(["eval", *words, "--stored"], standalone_mode=False)

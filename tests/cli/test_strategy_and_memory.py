"""The strategy and the memory in a configuration, and their effect on a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from agentfly.agents.memory import Window
from agentfly.cli import main as cli
from agentfly.cli.config_file import load_config
from agentfly.cli.experiment import Experiment
from agentfly.core.errors import ConfigError
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories

PROJECT = '''
import agentfly as af
from agentfly.formats.toolcalls.action import ActionFormat
from agentfly.core.messages import ToolCall

class Insistent(ActionFormat):
    """Takes every turn for a call, so that an untrained model has rollouts of several turns."""

    def parse(self, text, tools, *, first_call=0):
        return (ToolCall(f"call_{first_call}", "look", {"item": "tea"}),)

@af.tool
def look(item: str) -> af.ToolResult:
    """Look at an item.

    Args:
        item: the item.
    """
    return af.ToolResult(f"{item}: low", reward=0.25, state={"item": item})

@af.reward
def later(context: af.Context) -> float:
    return float(context.attempt)

def agent(model: str) -> af.Agent:
    clerk = af.Agent(model=model).as_tool("Answers.", name="clerk")
    return af.Agent(
        model=model, tools=[look, clerk], tool_call_format=Insistent(), tool_prompt="", max_turns=3,
        max_tokens_per_turn=200
    )
'''
CONFIG = {
    "agent": "insistent.py:agent",
    "model": "tiny",
    "tasks": "tasks.jsonl",
    "reward": "insistent.py:later",
    "training": {"steps": 1, "tasks_per_step": 2, "attempts": 2, "seed": 3},
}


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    (tmp_path / "insistent.py").write_text(PROJECT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What about tea?"}\n{"prompt": "What about rice?"}\n')
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delitem(sys.modules, "insistent", raising=False)
    return path


def test_the_memory_of_a_configuration_replaces_the_agents_own(config):
    def experiment(*words):
        return Experiment.load(load_config(config, words))

    plain = experiment()
    windowed = experiment("memory.kind=window", "memory.turns=2", "training.strategy=step")
    assert windowed.agent.memory == Window(2) != plain.agent.memory
    assert (plain.config.training.strategy, windowed.config.training.strategy) == ("chain", "step")
    with pytest.raises(ConfigError, match="turns"):
        experiment("memory.kind=window", "memory.turn=2")
    with pytest.raises(ConfigError, match="'chain' or 'step'"):
        load_config(config, ["training.strategy=steps"])


def test_the_configured_model_also_applies_to_subagents(config):
    agent = Experiment.load(load_config(config, ["model=other"])).agent
    assert [one.model for one in (agent, *agent.subagents)] == ["other", "other"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sequences"), [("chain", 1), ("step", 3)])
def test_a_run_is_trained_under_either_strategy_and_each_trajectory_counts_once(
    config, monkeypatch, strategy, sequences
):
    words = ["train", str(config), f"training.strategy={strategy}", "run_dir=run"]
    monkeypatch.setattr(sys, "argv", ["agentfly", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    run = RunDirectory("run")
    [(_, path)] = run.trajectory_files("train")
    trajectories = list(load_trajectories(path))
    assert [len(one.sequences) for one in trajectories] == [sequences] * 4
    assert {turn.reward for one in trajectories for turn in one.turns} == {0.25}
    assert [len({turn.anchor for turn in one.turns}) for one in trajectories] == [2] * 4
    [row] = run.metrics("train")
    assert row.values["rows"] == 4 * sequences
    assert row.values["reward/mean"] == 0.5
    assert row.values["mismatch/logprob_diff_max"] < 1.0

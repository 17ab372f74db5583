"""train: one blocking call that leaves a complete run directory."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import AgentFlyError, ConfigError, UsageError
from agentfly.core.gc_tuning import GEN0_THRESHOLD
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.sft.sft import sft
from agentfly.training.train import train, train_async
from agentfly.training.trainer import Trainer

AGENT = Agent(model="tiny", max_turns=1, max_tokens_per_turn=4)


@reward
def brief(response: str) -> float:
    """The fewer distinct characters, the better."""
    return 1.0 / (1.0 + len(set(response)))


def test_a_run_is_kept_in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(AGENT, ["a", "b"], brief, steps=1, tasks_per_step=2, attempts=2)
    run = RunDirectory(result.run_dir)
    assert run.path.parent.name == "runs"
    assert run.metrics()[0].values["reward/mean"] == pytest.approx(result.metrics[1]["reward/mean"])
    assert run.events_file.stat().st_size > 0
    assert any(run.tensorboard.iterdir())
    assert result.checkpoint.is_dir()


def test_garbage_collection_is_tuned_during_the_run_and_restored_afterwards(tmp_path: Path) -> None:
    seen, before = [], gc.get_threshold()

    @reward
    def looks(response: str) -> float:
        seen.append((gc.get_freeze_count() > 100_000, gc.get_threshold()[0]))
        return 1.0 / (1.0 + len(response))

    train(AGENT, ["a"], looks, run_dir=tmp_path / "run", steps=1, tasks_per_step=1, attempts=2)
    assert seen == [(True, GEN0_THRESHOLD)] * 2
    assert gc.get_freeze_count() < 10_000
    assert gc.get_threshold() == before


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if "tfevents" not in path.name}


async def test_a_run_that_is_awaited_takes_the_same_arguments_and_leaves_the_same_files(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 1, "tasks_per_step": 2, "attempts": 2}
    await asyncio.to_thread(train, AGENT, ["a", "b"], brief, run_dir=tmp_path / "blocking", **settings)
    result = await train_async(AGENT, ["a", "b"], brief, run_dir=tmp_path / "awaited", **settings)
    assert result.run_dir == tmp_path / "awaited"
    assert files_of(tmp_path / "awaited") == files_of(tmp_path / "blocking")
    assert signature(train).parameters == signature(train_async).parameters


@pytest.mark.parametrize(
    ("metric", "output"),
    [("reward/maen", "Did you mean 'reward/mean'"), ("accuracy", "There are: rollouts, .*finish/…")],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_anything_runs(
    tmp_path: Path, metric: str, output: str
) -> None:
    settings: dict[str, Any] = {"eval_tasks": ["c"], "keep_best": True, "eval_metric": metric}
    with pytest.raises(ConfigError, match=f"eval_metric='{metric}': evaluations have no such metric. {output}"):
        train(AGENT, ["a"], brief, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_settings_replace_those_of_a_config(tmp_path: Path) -> None:
    config = TrainConfig(steps=2, tasks_per_step=1, attempts=2)
    result = train(AGENT, ["a"], brief, run_dir=tmp_path / "run", config=config, steps=1)
    assert result.steps == 1
    with pytest.raises(ConfigError, match="config is a dict; it must be a TrainConfig"):
        train(AGENT, ["a"], brief, run_dir=tmp_path / "other", config={"steps": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'steps'"):
        train(AGENT, ["a"], brief, run_dir=tmp_path / "other", config=config, stepz=1)
    assert not (tmp_path / "other").exists()


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "tasks_per_step": 1, "attempts": 2}
    train(AGENT, ["a", "b"], brief, steps=1, **settings)
    result = train(AGENT, ["a", "b"], brief, steps=2, resume=True, **settings)
    assert list(result.metrics) == [2]
    assert [row.step for row in RunDirectory(result.run_dir).metrics()] == [1, 2]


def test_a_misspelt_setting_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        train(AGENT, ["a"], brief, run_dir=tmp_path / "run", learning_rat=1e-3)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("agent", "settings"), [(AGENT, {"device": "cuda"}), (replace(AGENT, model="tinny"), {})], ids=["device", "model"]
)
def test_a_run_whose_model_cannot_be_loaded_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, agent: Agent, settings: dict
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine" if named else None
    for call in (partial(train, agent, ["a"], brief), partial(sft, agent, [Trajectory("r", "g", Task("a"))])):
        with pytest.raises(AgentFlyError, match=r"no GPU|no model"):
            call(run_dir=run_dir, **settings)
        assert not any(tmp_path.glob("runs/*"))


def test_held_out_tasks_that_are_also_training_tasks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_on, held_out = ["a", "b"], [Task("b", id="held-out-1"), Task("c", id="held-out-2")]
    Trainer(AGENT, trained_on, brief, run_dir=tmp_path, eval_tasks=held_out)
    assert "1 of 2 held-out tasks are among the tasks that are trained on" in caplog.text
    caplog.clear()
    Trainer(AGENT, trained_on, brief, run_dir=tmp_path, eval_tasks=held_out[1:])
    assert caplog.text == ""


@pytest.mark.parametrize("named", [True, False])
def test_a_refused_run_leaves_no_directory_and_can_start_there_after_the_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine" if named else None
    with pytest.raises(ConfigError, match="top_p"):
        train(replace(AGENT, top_p=0.5), ["a"], brief, run_dir=run_dir)
    assert not any(tmp_path.glob("runs/*"))
    train(AGENT, ["a"], brief, run_dir=run_dir, steps=1, tasks_per_step=1, attempts=2)


def test_a_run_refused_after_loading_its_model_can_start_again_in_the_same_directory(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "steps": 1, "tasks_per_step": 1, "attempts": 2}
    with pytest.raises(ConfigError, match="cannot be trained"):
        train(AGENT, ["a"], brief, policy=ScriptedPolicy(["a"]), **settings)
    train(AGENT, ["a"], brief, **settings)
    with pytest.raises(ConfigError, match="already holds a run"):
        train(AGENT, ["a"], brief, **settings)


def test_going_on_needs_to_know_with_which_run() -> None:
    with pytest.raises(ConfigError, match="resume=True needs run_dir"):
        train(AGENT, ["a"], brief, resume=True)


@pytest.mark.parametrize(("progress", "shown"), [({}, True), ({"progress": False}, False)])
def test_progress_is_shown_unless_it_is_not_wanted(tmp_path: Path, capsys, progress: dict, shown: bool) -> None:
    train(AGENT, ["a"], brief, run_dir=tmp_path, steps=1, tasks_per_step=1, attempts=2, **progress)
    captured = capsys.readouterr()
    assert ("step 1/1" in captured.err) is shown
    assert captured.out == ""


@tool
def look(item: str) -> str:
    """Look at an item."""
    return item


def make_agent(model: str) -> Agent:
    return replace(AGENT, model=model)


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (make_agent, r"pass the Agent, e.g. make_agent\('tiny'\)"),
        (look, "look is a tool, not an agent"),
        ("tiny", "agent is a str, not an Agent"),
    ],
)
def test_only_an_agent_can_be_trained_or_rolled_out(tmp_path: Path, given: object, output: str) -> None:
    with pytest.raises(UsageError, match=output):
        train(given, ["a"], brief, run_dir=tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=output):
        asyncio.run(run(given, ["a"]))  # type: ignore[arg-type]

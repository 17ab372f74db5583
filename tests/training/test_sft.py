"""The supervised warm start: maximum likelihood of the agent's own turns, resumable, with the trainer's checkpoints."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly as af
from agentfly.cli import main as cli
from agentfly.core.errors import ConfigError
from agentfly.core.events import Event, EventStream, TrainingStarted
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories
from agentfly.policies.load import load_policy
from agentfly.tasks.stockroom import eval_tasks, hermes_agent, stockroom_reward
from agentfly.training.rows import Row
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.sft import sft
from agentfly.training.sft.trainer import SFTLearner, SFTResult

AGENT = af.Agent(model="tiny", max_turns=1)
SMALL: dict[str, Any] = {
    "learning_rate": 3e-3,
    "rows_per_update": 4,
    "epochs": 3,
    "dtype": "float32",
    "threads": 1,
    "min_reward": 0.0,
}


@af.reward
def fine() -> float:
    return 1.0


@cache
def output() -> list[af.Trajectory]:
    tasks = [af.Task(f"Say {word}.", id=word) for word in ("apple", "blue", "book", "door", "fish", "green", "hand")]
    policy = af.ScriptedPolicy(lambda prompt, turn: prompt.rpartition("Say ")[2].partition(".")[0] * 2)
    return asyncio.run(af.run(AGENT, tasks, reward=fine, policy=policy)).trajectories


def started(run_dir: Path, **settings: Any) -> SFTResult:
    return sft(AGENT, output(), run_dir=run_dir, progress=False, **{**SMALL, **settings})


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_policy(path, dtype="float32").model.state_dict()


def row(ids: list[int], mask: list[int]) -> Row:
    unknown = [float("nan")] * len(ids)
    return Row(ids, mask, unknown, [-1] * len(ids), "g", "r", 1.0, False)


ROWS = [row([1, 344, 202, 5, 9, 0, 7], [0, 0, 0, 1, 1, 1, 0]), row([1, 8, 9, 10], [0, 0, 1, 1]), row([1, 4], [0, 1])]


def test_the_loss_equals_the_loss_of_transformers_on_the_agents_tokens():
    model = load_policy("tiny", dtype="float32").model
    learner = SFTLearner(model, SFTConfig(), updates=1)
    for one in ROWS:
        ids = torch.tensor([one.ids])
        labels = torch.where(torch.tensor([one.loss_mask]) > 0, ids, -100)
        with torch.no_grad():
            theirs = float(model(input_ids=ids, labels=labels).loss)
        assert learner.loss([one]) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("changes", [{"micro_batch_tokens": 1}, {"gradient_checkpointing": True}])
def test_no_setting_that_bounds_memory_changes_the_update(changes):
    learned = []
    for settings in ({}, changes):  # type: ignore[var-annotated]
        model = load_policy("tiny", dtype="float32").model
        learner = SFTLearner(model, SFTConfig(learning_rate=1e-3, warmup_ratio=0.0, **settings), updates=3)
        metrics = learner.learn(ROWS)
        learned.append([metrics["sft/loss"], metrics["policy/grad_norm"], learner.loss(ROWS)])
    assert learned[1] == pytest.approx(learned[0], rel=1e-4)
    assert learned[0][2] < learned[0][0]


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_rises_and_follows_its_schedule(schedule, shares):
    config = SFTConfig(schedule=schedule, warmup_ratio=1 / 3, learning_rate=1e-4)
    learner = SFTLearner(load_policy("tiny", dtype="float32").model, config, updates=6)
    rates = [learner.learn(ROWS)["policy/learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([1e-4 * share for share in shares], abs=1e-10)


def test_trained_turns_become_likelier_and_the_run_is_stored(tmp_path):
    result = started(tmp_path / "run", eval_fraction=0.3, epochs=4)
    assert result.updates == 8
    assert sum(list(result.losses.values())[-2:]) < 0.5 * sum(list(result.losses.values())[:2])
    assert list(result.held_out) == [0, 2, 4, 6, 8]
    run = RunDirectory(tmp_path / "run")
    assert [line.step for line in run.metrics()] == list(range(1, 9))
    assert [line.values["sft/held_out_loss"] for line in run.metrics("eval")] == list(result.held_out.values())


@pytest.mark.slow
def test_the_checkpoint_is_a_model_that_repeats_its_training_data(tmp_path):
    result = started(tmp_path, eval_fraction=0.0, epochs=25)
    learned = AGENT.with_model(result.checkpoint)
    answers = asyncio.run(af.evaluate(learned, ["Say apple.", "Say green."], reward=fine)).trajectories
    assert [answer.response for answer in answers] == ["appleapple", "greengreen"]


class Stopped(BaseException):
    """Stands in for a process that is killed between two updates."""


def test_a_killed_run_resumes_identically(tmp_path, monkeypatch):
    unbroken = started(tmp_path / "unbroken", checkpoint_every_updates=1)
    learn = SFTLearner.learn

    def killed(self, rows):
        if self.updates_done == 3:
            raise Stopped
        return learn(self, rows)

    monkeypatch.setattr(SFTLearner, "learn", killed)
    with pytest.raises(Stopped):
        started(tmp_path / "broken", checkpoint_every_updates=2)
    monkeypatch.undo()
    again = started(tmp_path / "broken", checkpoint_every_updates=1, resume=True)
    assert list(again.losses) == [3, 4, 5, 6]
    assert again.losses == {step: unbroken.losses[step] for step in again.losses}
    first, second = weights(unbroken.checkpoint), weights(again.checkpoint)
    assert all(torch.equal(first[name], second[name]) for name in first)
    run = RunDirectory(tmp_path / "broken")
    assert [line.step for line in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_a_run_resumes_only_with_the_settings_it_was_started_with(tmp_path):
    started(tmp_path, epochs=1)
    with pytest.raises(ConfigError, match="already holds a run"):
        started(tmp_path, epochs=1)
    with pytest.raises(ConfigError, match="learning_rate"):
        started(tmp_path, epochs=1, learning_rate=1e-4, resume=True)
    with pytest.raises(ConfigError, match="the trajectories"):
        sft(AGENT, output()[:4], run_dir=tmp_path, progress=False, resume=True, **{**SMALL, "epochs": 1})


def test_a_warm_start_is_made_longer_where_its_learning_rate_does_not_depend_on_its_length(tmp_path):
    told_of: list[str] = []
    events = EventStream()
    even = {"schedule": "constant", "warmup_ratio": 0.0, "eval_fraction": 0.0}

    def keep(event: Event) -> None:
        told_of.extend([event.further] if isinstance(event, TrainingStarted) else [])

    with events.subscribed(keep):
        started(tmp_path / "even", epochs=1, events=events, **even)
        longer = started(tmp_path / "even", epochs=2, resume=True, events=events, **even)
        assert list(longer.losses) == [3, 4]
        started(tmp_path / "falls", epochs=1, events=events)
        with pytest.raises(ConfigError, match="epochs"):
            started(tmp_path / "falls", epochs=2, resume=True)
    assert told_of[:2] == ["to extend it, set a larger sft.epochs"] * 2
    assert "the schedule cosine has ended, so it cannot be extended" in told_of[2]
    assert f"model=CHECKPOINT, one of those in {tmp_path / 'falls' / 'checkpoints'}" in told_of[2]


def test_only_adapters_are_trained_and_saved_if_configured(tmp_path):
    result = started(tmp_path, lora={"rank": 4, "alpha": 8}, epochs=2, eval_fraction=0.0)
    assert result.losses[4] < result.losses[1]
    assert (result.checkpoint / "adapter" / "adapter_config.json").is_file()
    assert not list(result.checkpoint.glob("model*.safetensors"))
    merged, base = weights(result.checkpoint), load_policy("tiny", dtype="float32").model.state_dict()
    assert set(merged) == set(base)
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved
    assert all("_proj" in name for name in moved)


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"sft.epoch'. Did you mean 'sft.epochs'"):
        started(tmp_path, epoch=3)


@pytest.fixture
def agentfly(tmp_path, monkeypatch, capsys):
    """Run a command, which goes well; answers what it prints."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["agentfly", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        assert left.value.code in (0, None), captured.err
        return captured.out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("task", ["stockroom", "depot"])
def test_a_shipped_task_is_warm_started_from_its_oracle_as_the_guide_has_it(agentfly, task):
    config = str(Path(af.__file__).parent / "tasks" / task / "tiny.yaml")
    agentfly("rollout", config, "policy=oracle", "-n", "12", "--quiet", "run_dir=runs/oracle")
    [played] = RunDirectory("runs/oracle").saved_trajectories()
    assert [one.reward for one in load_trajectories(played)] == [1.0] * 12
    output = agentfly("sft", config, "runs/oracle", "run_dir=runs/warm", "sft.learning_rate=1e-5", "sft.epochs=1")
    assert re.search(r"trajectories learned from, rendered for this model . 12 ", output)
    [checkpoint] = Path("runs/warm/checkpoints").iterdir()
    agentfly("train", config, f"model={checkpoint}", "training.steps=1", "training.tasks_per_step=2")


@pytest.mark.slow
def test_a_model_learns_from_the_oracle_on_the_command_line(agentfly):
    agentfly("init", "shop")
    config = "shop/config.yaml"
    agentfly("rollout", config, "policy=oracle", "-n", "48", "--quiet", "run_dir=runs/oracle")
    output = agentfly("sft", config, "runs/oracle", "run_dir=runs/warm", "sft.learning_rate=1e-3", "sft.epochs=3")
    assert "trajectories learned from, rendered for this model" in output
    scores = agentfly("eval", "runs/warm", "training.eval_attempts=1", "training.eval_temperature=0", "--json")
    assert json.loads(scores)["success"]["mean"] == 1.0


@pytest.mark.slow
def test_own_rollouts_that_won_are_learned_by_the_ids_that_were_sampled(tmp_path):
    agent = hermes_agent("tiny")
    result = asyncio.run(af.run(agent, eval_tasks()[:8], reward=stockroom_reward, attempts=4))
    learned = sft(agent, result.trajectories, run_dir=tmp_path, progress=False, **{**SMALL, "eval_fraction": 0.0})
    won = [one for one in result.trajectories if one.reward >= 0]
    assert learned.examples.sampled + learned.examples.excluded.get("repeated", 0) == len(won)
    assert learned.examples.rendered == 0

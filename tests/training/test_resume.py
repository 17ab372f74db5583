"""Resuming: which runs can be resumed, and what is dropped before it is repeated."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError
from agentfly.core.events import EvaluationFinished, StepFinished
from agentfly.core.run_directory import RunDirectory
from agentfly.rollouts.rollout_record import agent_fingerprint
from agentfly.training.checkpoints import TrainerState
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.resume import FREE_TO_CHANGE, can_resume, remove_after, require_same_run
from agentfly.viewing.event_log import MetricsWriter


def place(**settings: Any) -> TrainerState:
    config = TrainConfig(**settings).model_dump(mode="json")
    return TrainerState(0, 0, 0, "tiny", "abc", agent_fingerprint(agent()), "brief", config)


@tool
def look(item: str) -> str:
    """Look at an item."""
    return item


@tool(name="look")
def look_closely(item: str, seconds: int) -> str:
    """Look at an item for a while."""
    return item


def agent(**changes: Any) -> Agent:
    return Agent(**{"model": "tiny", "tools": [look], "system_prompt": "Look at things.", **changes})


def run_of_three_steps(path: Path) -> RunDirectory:
    run = RunDirectory(path).ensure()
    write = MetricsWriter(run)
    for step in range(4):
        if step:
            run.trajectories_file(step).write_text("{}\n")
            write(StepFinished(step=step, metrics={"reward/mean": step / 10}))
        run.trajectories_file(step, "eval").write_text("{}\n")
        write(EvaluationFinished(step=step, metrics={"reward/mean": step / 10}))
    return run


def test_metrics_and_trajectories_after_the_checkpoint_are_forgotten_and_no_others(tmp_path: Path) -> None:
    run = run_of_three_steps(tmp_path)
    with run.metrics_file.open("a") as file:
        file.write('{"kind": "train", "step": 4, "ti')  # cut by the kill
    remove_after(run, 2)
    assert [row.step for row in run.metrics("train")] == [1, 2]
    assert [row.step for row in run.metrics("eval")] == [0, 1, 2]
    assert [step for step, _ in run.trajectory_files("train")] == [1, 2]
    assert [step for step, _ in run.trajectory_files("eval")] == [0, 1, 2]
    assert len(run.metrics_file.read_text().splitlines()) == 5


def test_without_a_checkpoint_everything_is_done_again(tmp_path: Path) -> None:
    run = run_of_three_steps(tmp_path)
    remove_after(run, None)
    assert run.metrics("train") == run.metrics("eval") == []
    assert run.trajectory_files("train") == run.trajectory_files("eval") == []


def test_settings_that_shape_the_learning_cannot_change_and_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        require_same_run(place(), place(learning_rate=0.5, attempts=4))
    assert "learning_rate was 1e-05 and is now 0.5" in str(refusal.value)
    assert "attempts was 8 and is now 4" in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "expected_text"),
    [
        ("model", "other", "the model was 'tiny' and is now 'other'"),
        ("tasks", "xyz", "the tasks"),
        ("reward", "wordy", "the reward was 'brief' and is now 'wordy'"),
    ],
)
def test_a_changed_model_reward_or_task_list_is_refused(field: str, value: str, expected_text: str) -> None:
    with pytest.raises(ConfigError, match=expected_text):
        require_same_run(place(), replace(place(), **{field: value}))  # type: ignore[arg-type]


def test_a_run_can_be_made_longer_and_looked_at_more_often() -> None:
    require_same_run(place(), place(steps=500, eval_every_steps=2, threads=1, keep_checkpoints=9))
    require_same_run(place(), place(micro_batch_tokens=64, gradient_checkpointing=True))


def test_a_run_with_a_decaying_learning_rate_cannot_be_extended() -> None:
    with pytest.raises(ConfigError, match="steps was 100 and is now 200"):
        require_same_run(place(schedule="cosine"), place(schedule="cosine", steps=200))


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"system_prompt": "Do as you like."}, ["system message has changed"]),
        ({"tool_prompt": "There is a tool."}, ["system message has changed"]),
        ({"tools": [look_closely]}, ["system message has changed", "tool look has changed"]),
        ({"tools": []}, ["tool look is missing"]),
        ({"tool_call_format": "action"}, ["tool-call format was 'hermes' and is now 'action'"]),
        ({"max_turns": 3}, ["max_turns was 10 and is now 3"]),
        ({"max_tokens_per_turn": 9}, ["max_tokens_per_turn was 512 and is now 9"]),
        ({"max_sequence_tokens": 900}, ["max_sequence_tokens was None and is now 900"]),
        ({"max_tool_calls": 2}, ["max_tool_calls was None and is now 2"]),
        ({"max_wall_seconds": 2.5}, ["max_wall_seconds was None and is now 2.5"]),
        ({"max_consecutive_invalid_calls": 1}, ["max_consecutive_invalid_calls was 3 and is now 1"]),
    ],
)
def test_a_changed_agent_is_refused_and_the_differences_are_named(
    changes: dict[str, Any], expected_text: list[str]
) -> None:
    now = replace(place(), agent=agent_fingerprint(agent(**changes)))
    with pytest.raises(ConfigError) as refusal:
        require_same_run(place(), now)
    for part in expected_text:
        assert f"the agent's {part}" in str(refusal.value)


def test_settings_that_may_change_on_resume_exist() -> None:
    assert set(TrainConfig.model_fields) >= FREE_TO_CHANGE


@pytest.mark.parametrize(
    "kept", ["trajectories/train-000001.jsonl", "trajectories/eval-000000.jsonl", "journal/a.jsonl"]
)
def test_before_there_is_a_checkpoint_rollouts_are_not_thrown_away_for_other_settings_either(
    tmp_path: Path, kept: str
) -> None:
    run, started_run = RunDirectory(tmp_path).ensure(), asdict(place())
    run.journal.mkdir()
    assert not can_resume(run, started_run, place(learning_rate=0.5))  # there is nothing yet
    (tmp_path / kept).write_text("{}\n")
    assert can_resume(run, started_run, place())
    assert not can_resume(run, None, place())
    assert not can_resume(run, {"step": 0}, place())
    with pytest.raises(ConfigError, match=r"learning_rate was 1e-05 and is now 0.5"):
        can_resume(run, started_run, place(learning_rate=0.5))

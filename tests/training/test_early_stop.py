"""Early stopping: the best step, when a run has converged, and which checkpoint is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.core.errors import ConfigError
from agentfly.core.events import EvaluationFinished, Event, EventStream, RolloutFinished, TrainingFinished
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.runner import Runner
from agentfly.training.config.groups import EarlyStopConfig
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.evaluator import EvaluationHistory, Evaluator
from agentfly.training.trainer import Trainer, TrainResult
from agentfly.viewing.event_log import MetricsWriter

METRIC = "reward/mean"


def standing(*values: float) -> EvaluationHistory:
    found = EvaluationHistory()
    for step, value in enumerate(values):
        found = found.with_evaluation(step, {METRIC: value}, METRIC)
    return found


def test_the_best_is_the_first_of_the_highest() -> None:
    assert standing(0.1, 0.5, 0.5, 0.2) == EvaluationHistory(0.5, 1, 2)


def test_an_evaluation_without_the_metric_counts_for_nothing_once_there_was_one_with_it() -> None:
    assert standing(0.1).with_evaluation(1, {}, METRIC) == standing(0.1)
    with pytest.raises(ConfigError, match="Did you mean 'reward/mean'"):
        EvaluationHistory().with_evaluation(0, {METRIC: 0.1}, "reward/maen")


@pytest.mark.parametrize(
    ("rule", "values", "message"),
    [
        ({"target": 0.5}, [0.1, 0.4], ""),
        ({"target": 0.5}, [0.1, 0.6], "reward/mean reached 0.6 after step 1, and the target is 0.5"),
        ({"patience": 2}, [0.3, 0.2], ""),
        ({"patience": 2}, [0.3, 0.2, 0.4, 0.1], ""),
        ({"patience": 2}, [0.3, 0.2, 0.3], "reward/mean has not risen above 0.3, found after step 0, in 2 evaluations"),
    ],
)
def test_a_run_has_seen_enough_at_its_target_or_when_its_patience_ends(
    rule: dict[str, Any], values: list[float], message: str
) -> None:
    assert standing(*values).stop_reason(EarlyStopConfig(**rule), METRIC) == message
    assert standing(*values).stop_reason(None, METRIC) == ""


def test_settings_that_need_evaluations_are_refused_without_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set eval_every_steps"):
        TrainConfig(early_stop={"patience": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither a target nor patience"):
        TrainConfig(early_stop={}, eval_every_steps=1)  # type: ignore[arg-type]
    asking = {"early_stop": {"patience": 1}, "eval_every_steps": 1}, {"keep_best": True}, {"eval_every_steps": 1}
    for settings in asking:
        with pytest.raises(ConfigError, match="Pass eval_tasks"):
            Trainer(Agent(model="tiny"), ["a"], scripted, run_dir=tmp_path, config=TrainConfig(**settings))


SCORES = [0.0, 0.4, 0.2, 0.1, 0.3, 0.9]
"""Of the evaluations, one after the other."""

evaluations = 0


@reward
async def scripted(prompt: str) -> float:
    """Held-out tasks get what is in the script."""
    global evaluations
    if prompt != "held out":
        return 0.5
    evaluations += 1
    return SCORES[evaluations - 1]


async def trained(
    path: Path, *, events: EventStream | None = None, resume: bool = False, **settings: Any
) -> TrainResult:
    config = TrainConfig(
        **{"steps": 5, "tasks_per_step": 1, "attempts": 2, "eval_every_steps": 1, "keep_checkpoints": 1, "threads": 1}
        | {"checkpoint_every_steps": 4}
        | settings
    )
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=3)
    trainer = Trainer(
        agent, ["a", "b"], scripted, run_dir=path, eval_tasks=["held out"], config=config, events=events, resume=resume
    )
    return await trainer.run()


@pytest.fixture(autouse=True)
def from_the_beginning() -> None:
    global evaluations
    evaluations = 0


async def test_patience_ends_a_run_with_a_checkpoint_and_more_patience_resumes_it(tmp_path: Path) -> None:
    events, seen = EventStream(), list[Event]()
    with events.subscribed(seen.append):
        result = await trained(tmp_path, events=events, early_stop={"patience": 2})
    assert result.steps == 3
    assert list(result.evaluations) == [0, 1, 2, 3]
    assert result.checkpoint.name == "step-000003"
    assert "in 2 evaluations" in result.stopped_early
    assert seen[-1].reason == result.stopped_early  # type: ignore[attr-defined]
    assert isinstance(seen[-1], TrainingFinished)
    assert (await trained(tmp_path, resume=True, early_stop={"patience": 2})).steps == 3  # it has seen enough already
    longer = await trained(tmp_path, resume=True, early_stop={"patience": 3})
    assert list(longer.evaluations) == [4]
    assert "in 3 evaluations" in longer.stopped_early
    assert (await trained(tmp_path, resume=True)).steps == 5


async def test_a_target_that_is_met_before_the_first_step_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    result = await trained(tmp_path, early_stop={"target": 0.0})
    assert result.steps == 0
    assert result.checkpoint.name == "step-000000"


async def test_the_best_step_has_a_checkpoint_that_is_kept_and_found_by_its_link(tmp_path: Path) -> None:
    result = await trained(tmp_path, steps=4, keep_best=True)
    saved = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"best", "step-000001", "step-000004"}
    assert result.best_checkpoint == (tmp_path / "checkpoints" / "step-000001").resolve()
    longer = await trained(tmp_path, steps=5, keep_best=True, resume=True)
    assert longer.best_checkpoint is not None
    assert longer.best_checkpoint.name == "step-000005"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best", "step-000005"}


async def test_a_stored_evaluation_is_repeated_only_if_its_settings_changed(tmp_path: Path) -> None:
    run, asked = RunDirectory(tmp_path).ensure(), list[Event]()
    events = EventStream()
    policy = ScriptedPolicy(["fine"])
    async with policy, Runner(Agent(model="scripted"), policy=policy, reward=scripted, events=events) as runner:

        async def rolled_out(**settings: Any) -> int:
            asked.clear()
            with events.subscribed(asked.append):
                await Evaluator(run, [Task("held out")], TrainConfig(**settings), events).evaluate(runner, 3)
            assert isinstance(asked[-1], EvaluationFinished)
            return sum(isinstance(event, RolloutFinished) for event in asked)

        assert await rolled_out() == 1
        assert await rolled_out() == 0
        assert await rolled_out(eval_temperature=0.5, eval_attempts=2) == 2
        MetricsWriter(run)(EvaluationFinished(step=3, metrics={METRIC: 0.7}))  # it was told
        output = await Evaluator(run, [Task("held out")], TrainConfig(), events).evaluate(runner, 3)
        assert output == {METRIC: 0.7}


async def test_a_run_resumed_with_another_metric_starts_a_new_evaluation_history(tmp_path: Path) -> None:
    first = await trained(tmp_path, steps=2, keep_best=True)
    assert first.best_checkpoint is not None
    assert first.best_checkpoint.name == "step-000001"
    looks = {"keep_best": True, "early_stop": {"target": 0.4}, "eval_metric": "tool_calls/mean"}
    again = await trained(tmp_path, steps=3, resume=True, **looks)  # type: ignore[arg-type]
    assert again.steps == 3
    assert again.best_checkpoint == again.checkpoint.resolve()


async def test_no_checkpoint_is_kept_for_being_the_best_where_that_is_not_asked_for(tmp_path: Path) -> None:
    await trained(tmp_path, steps=1, early_stop={"patience": 3})
    longer = await trained(tmp_path, steps=4, early_stop={"patience": 9}, resume=True)
    assert longer.best_checkpoint is None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-000004"}

"""The trainer end to end with the shipped tiny model: a step, its files, and stopping."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentfly.agents.agent import Agent
from agentfly.agents.reward import Reward, reward
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, PrerequisiteError, UsageError
from agentfly.core.events import (
    CheckpointSaved,
    Event,
    EventStream,
    RolloutFinished,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories
from agentfly.policies.load import load_policy
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs, Advantages, Algorithm
from agentfly.training.checkpoints import require_valid
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.config.train_config import OwnCode, TrainConfig
from agentfly.training.learning.batches import UpdateCancelled
from agentfly.training.learning.learner import Learner
from agentfly.training.losses import LOSSES, PolicyLoss
from agentfly.training.losses.aggregation import ClipRange, TokenBatch, TokenLoss
from agentfly.training.train import train
from agentfly.training.trainer import Trainer, TrainResult
from agentfly.viewing.event_log import MetricsWriter

TASKS = [f"Say something about {number}." for number in range(10)]
SMALL: dict[str, Any] = {"tasks_per_step": 2, "attempts": 3, "steps": 2, "learning_rate": 3e-3, "dtype": "float32"}


@reward
def later(context: Context) -> float:
    """Later attempts get higher rewards, so that every batch has a learning signal."""
    return context.attempt / 2


def agent(**changes: Any) -> Agent:
    return Agent(**{"model": "tiny", "max_turns": 1, "max_tokens_per_turn": 6, **changes})


async def trained(
    path: Path, *, score: Reward = later, events: EventStream | None = None, **settings: Any
) -> TrainResult:
    stream = events or EventStream()
    others = {name: settings.pop(name) for name in ("resume", "eval_tasks", "policy") if name in settings}
    trainer = Trainer(
        agent(), TASKS, score, run_dir=path, config=TrainConfig(**{**SMALL, **settings}), events=stream, **others
    )
    with stream.subscribed(MetricsWriter(RunDirectory(path).ensure())):
        return await trainer.run()


@pytest.mark.slow
async def test_a_run_leaves_metrics_trajectories_and_a_checkpoint_that_any_program_loads(tmp_path: Path) -> None:
    events = EventStream()
    seen: list[Event] = []
    with events.subscribed(seen.append):
        result = await trained(tmp_path, events=events, eval_tasks=TASKS[:2])
    run = RunDirectory(tmp_path)
    assert [row.step for row in run.metrics("train")] == [1, 2]
    assert [row.step for row in run.metrics("eval")] == [0, 2]
    assert {step: len(list(load_trajectories(path))) for step, path in run.trajectory_files("train")} == {1: 6, 2: 6}
    assert {step: len(list(load_trajectories(path))) for step, path in run.trajectory_files("eval")} == {0: 2, 2: 2}
    assert result.checkpoint == run.checkpoints / "step-000002"
    assert AutoModelForCausalLM.from_pretrained(result.checkpoint).num_parameters() > 0
    assert result.steps == 2
    kinds = [type(event) for event in seen]
    assert kinds.index(TrainingStarted) < kinds.index(StepFinished) < kinds.index(CheckpointSaved)
    assert kinds[-1] is TrainingFinished


async def test_a_run_on_a_cpu_is_exact_by_default_and_every_run_reports_its_number_format(
    tmp_path: Path,
) -> None:
    for dtype, found, most in (("auto", "float32", 1e-4), ("bfloat16", "bfloat16", 1.0)):
        events = EventStream()
        seen: list[Event] = []
        with events.subscribed(seen.append):
            result = await trained(tmp_path / dtype, events=events, dtype=dtype, device="cpu", steps=1, temperature=0.7)
        (started,) = (event for event in seen if isinstance(event, TrainingStarted))
        assert (started.model, started.dtype, started.device) == ("tiny", found, "cpu")
        assert result.metrics[1]["mismatch/logprob_diff_max"] < most


async def test_every_metric_is_finite_and_the_trainer_scores_what_the_policy_sampled(tmp_path: Path) -> None:
    result = await trained(tmp_path, temperature=0.7)
    for metrics in result.metrics.values():
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["mismatch/logprob_diff_max"] < 1e-4
        assert metrics["policy/staleness_max"] == 0
        assert metrics["rows"] == 6
        assert metrics["policy/updates"] == 1
    assert result.metrics[2]["policy/version"] == 1


async def test_an_update_changes_the_weights_that_the_policy_samples_from(tmp_path: Path) -> None:
    async with load_policy("tiny") as policy:
        before = [weight.detach().clone() for weight in policy.model.parameters()]
        result = await trained(tmp_path, policy=policy)
        assert any(not torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))
        saved = AutoModelForCausalLM.from_pretrained(result.checkpoint).state_dict()
        assert all(torch.equal(saved[name], weight) for name, weight in policy.model.state_dict().items())


async def test_attempts_that_cannot_be_scored_are_in_no_row_and_are_counted(tmp_path: Path) -> None:
    @reward
    def flaky(context: Context) -> float:
        """Fails for the first attempt."""
        if context.attempt == 0:
            raise ConnectionError("the judge is away")
        return later(context)

    metrics = (await trained(tmp_path, score=flaky, steps=1)).metrics[1]
    assert metrics["rows"] == 4
    assert metrics["excluded/infrastructure"] == 2
    assert metrics["failures/infrastructure"] == 2


async def test_a_run_with_failing_rewards_stops_and_reports_the_cause(tmp_path: Path) -> None:
    @reward
    def down(response: str) -> float:
        """Never answers."""
        raise ConnectionError("the judge is away")

    with pytest.raises(FailureBudgetExceeded, match="the judge is away"):
        await trained(tmp_path, score=down)


async def test_a_run_without_trainable_rollouts_stops_and_reports_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="6 unscored"):
        await trained(tmp_path, max_context_tokens=4)  # no prompt is as short as that


def test_a_run_without_a_source_of_rewards_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Nothing scores the rollouts"):
        Trainer(agent(), TASKS, run_dir=tmp_path)


async def test_without_a_reward_an_attempt_that_avoids_the_tools_that_score_counts_as_zero(tmp_path: Path) -> None:
    @tool
    def guess(number: int) -> ToolResult:
        """Guess a number, and hear that it is wrong."""
        return ToolResult("no", reward=-1.0)

    config = TrainConfig(**{**SMALL, "steps": 1})
    trainer = Trainer(agent(tools=[guess]), TASKS, run_dir=tmp_path, config=config)  # too few tokens for any call
    metrics = (await trainer.run()).metrics[1]
    assert (metrics["rows"], metrics["unscored"], metrics["reward/mean"]) == (6, 0, 0)


async def test_a_batch_of_equal_rewards_moves_nothing(tmp_path: Path) -> None:
    @reward
    def same(response: str) -> float:
        """Indifferent."""
        return 0.3

    metrics = (await trained(tmp_path, score=same)).metrics[2]
    assert metrics["groups/zero_variance_fraction"] == 1.0
    assert metrics["policy/updates"] == 0
    assert metrics["policy/version"] == 0


async def test_no_setting_is_left_unread_by_a_run(tmp_path: Path) -> None:
    read = set()

    class Watched(TrainConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    config = Watched(**SMALL)
    read.clear()  # of what was read to check the settings
    await Trainer(agent(), TASKS, later, run_dir=tmp_path, eval_tasks=TASKS[:1], config=config).run()
    assert set(TrainConfig.model_fields) - read == set()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_refused_run_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Trainer(agent(top_p=0.9), TASKS, later, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cut_distribution_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_p=0\.9"):
        Trainer(agent(top_p=0.9), TASKS, later, run_dir=tmp_path)
    cutting = agent(top_k=5).as_tool("Helps.", name="helper")
    with pytest.raises(ConfigError, match=r"A subagent .* top_k=5"):
        Trainer(agent(tools=[cutting]), TASKS, later, run_dir=tmp_path)
    other = agent(model="other", top_k=5).as_tool("Helps.", name="helper")
    Trainer(agent(tools=[other]), TASKS, later, run_dir=tmp_path)  # which is not trained


def test_a_temperature_of_zero_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all attempts at a task would be the same"):
        Trainer(agent(temperature=0.0), TASKS, later, run_dir=tmp_path)


async def test_a_policy_whose_weights_are_elsewhere_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ScriptedPolicy, which cannot be trained"):
        await trained(tmp_path, policy=ScriptedPolicy(["hello"]))


async def test_train_inside_an_event_loop_points_to_train_async(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"await af\.train_async"):
        train(agent(), TASKS, later, run_dir=tmp_path)


async def test_a_second_run_in_a_directory_must_resume(tmp_path: Path) -> None:
    await trained(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="resume=True"):
        await trained(tmp_path)


async def test_a_trainer_runs_only_once_and_reports_how_to_resume(tmp_path: Path) -> None:
    trainer = Trainer(agent(), TASKS, later, run_dir=tmp_path, config=TrainConfig(**{**SMALL, "steps": 1}))
    await trainer.run()
    with pytest.raises(UsageError, match="resume=True"):
        await trainer.run()


async def test_resuming_with_settings_that_affect_learning_is_refused(tmp_path: Path) -> None:
    @reward
    def earlier(context: Context) -> float:
        """The opposite."""
        return -context.attempt

    await trained(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"learning_rate was 0.003 and is now 0.1"):
        await trained(tmp_path, resume=True, learning_rate=0.1)
    other = Trainer(
        agent(temperature=0.3, system_prompt="Be brief.", max_turns=2),
        TASKS,
        earlier,
        run_dir=tmp_path,
        config=TrainConfig(**{**SMALL, "steps": 1}),
        resume=True,
    )
    with pytest.raises(ConfigError) as refusal:
        await other.run()
    for expected_text in (
        "temperature was 1.0 and is now 0.3",
        "the agent's system message has changed",
        "the agent's max_turns was 1 and is now 2",
        "the reward was 'later' and is now 'earlier'",
    ):
        assert expected_text in str(refusal.value)


async def test_a_full_disk_is_reported_with_its_remedy_and_finished_rollouts_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDirectory(tmp_path).ensure().trajectories
    sync = os.fsync

    def refuse_step_file(descriptor: int) -> None:
        if "train-000001.jsonl" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse_step_file)
        with pytest.raises(PrerequisiteError, match="Free some space"):
            await trained(tmp_path, steps=1)
    assert not any(files.iterdir())
    events, rolled_out = EventStream(), list[Event]()
    with events.subscribed(lambda event: rolled_out.append(event) if isinstance(event, RolloutFinished) else None):
        await trained(tmp_path, steps=1, resume=True, events=events)
    assert not rolled_out


@pytest.mark.slow
async def test_a_resumed_run_returns_its_current_checkpoint_and_never_a_damaged_one(tmp_path: Path) -> None:
    await trained(tmp_path, steps=3, checkpoint_every_steps=1, keep_checkpoints=3)
    (tmp_path / "checkpoints/step-000003/config.json").unlink()
    for steps in (2, 4):
        result = await trained(tmp_path, steps=steps, keep_checkpoints=3, resume=True)
        assert (result.steps, result.checkpoint) == (steps, tmp_path / f"checkpoints/step-{steps:06d}")
        assert require_valid(result.checkpoint)
    assert [row.step for row in RunDirectory(tmp_path).metrics()] == [1, 2, 3, 4]


async def test_a_run_is_trained_by_the_code_that_its_settings_name_by_reference(tmp_path: Path) -> None:
    used = []

    def estimate(evidence: AdvantageInputs, config: AdvantageConfig) -> Advantages:
        used.append("algorithm")
        return ALGORITHMS["reinforce"].estimate(evidence, config)

    def compute(batch: TokenBatch, clip: ClipRange) -> TokenLoss:
        used.append("loss")
        return LOSSES["policy_gradient"](batch, clip)

    own = {"algorithm": Algorithm(estimate), "loss": PolicyLoss(compute)}
    settings: dict[str, Any] = {**SMALL, "steps": 1, "algorithm": "here.py:mine", "loss": "here.py:mine_too"}
    config = TrainConfig.model_validate(settings, context=OwnCode(lambda reference, field: own[field]))
    await Trainer(agent(), TASKS, later, run_dir=tmp_path, config=config).run()
    assert used[:2] == ["algorithm", "loss"]


async def test_the_temperature_may_come_from_the_agent_or_the_settings_when_a_run_is_resumed(tmp_path: Path) -> None:
    await trained(tmp_path, steps=1)
    assert (await trained(tmp_path, steps=1, resume=True, temperature=1.0)).steps == 1


# --- how it stops, and goes on ----------------------------------------------------------------------------------------


async def stopped(path: Path, kind: type[Event], count: int, **settings: Any) -> None:
    """Run until the ``count``-th event of a kind, and cancel there."""
    events = EventStream()
    running = asyncio.create_task(trained(path, events=events, resume=True, **settings))
    seen = []

    def watch(event: Event) -> None:
        if isinstance(event, kind):
            seen.append(event)
            if len(seen) == count:
                running.cancel()

    with events.subscribed(watch), pytest.raises(asyncio.CancelledError):
        await running


def comparable(run: RunDirectory) -> list[dict[str, float]]:
    timed = ("time/", "rollout_seconds/", "concurrency/")
    return [
        {name: value for name, value in row.values.items() if not name.startswith(timed)}
        for kind in ("train", "eval")
        for row in run.metrics(kind)
    ]


def tasks_of(run: RunDirectory) -> list[str]:
    return [trajectory.task.id for _, path in run.trajectory_files() for trajectory in load_trajectories(path)]


@pytest.mark.slow
async def test_a_run_that_is_stopped_again_and_again_ends_as_one_that_never_was(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 5, "checkpoint_every_steps": 2, "eval_tasks": TASKS[:2]}
    # One generation at a time: in a batch, whose make-up depends on when each joins, the last bits of logits vary, and
    # an optimizer's first step makes as much of a gradient's last bit as of the whole.
    settings |= {"kl": {"coefficient": 0.01}, "warmup_steps": 3, "max_concurrent_generations": 1, "threads": 1}
    await trained(tmp_path / "whole", **settings)
    for kind, count in (
        (RolloutFinished, 1),  # in the evaluation before the first step
        (StepFinished, 1),  # before there is a checkpoint
        (RolloutFinished, 17),  # in the third step
        (StepFinished, 1),  # after the third step, which is not in the checkpoint
        (CheckpointSaved, 1),
    ):
        await stopped(tmp_path / "broken", kind, count, **settings)
    await trained(tmp_path / "broken", resume=True, **settings)
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    assert tasks_of(broken) == tasks_of(whole)
    assert len(set(tasks_of(whole))) == 10
    assert all(row.values["policy/updates"] for row in whole.metrics())
    for resumed, unbroken in zip(comparable(broken), comparable(whole), strict=True):
        assert resumed == pytest.approx(unbroken, rel=1e-4, abs=1e-5)


async def test_a_run_cancelled_in_its_update_waits_until_the_update_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_run, ended = threading.Event(), threading.Event()

    def learn(self: Learner, rows: Any, advantages: Any, scores: Any, stop: threading.Event) -> dict[str, float]:
        started_run.set()
        assert stop.wait(60)
        ended.set()
        raise UpdateCancelled

    monkeypatch.setattr(Learner, "learn", learn)
    async with load_policy("tiny") as policy:
        running = asyncio.create_task(trained(tmp_path, policy=policy))
        assert await asyncio.to_thread(started_run.wait, 60)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()  # a second Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended.is_set()
        async with asyncio.timeout(60), policy.exclusive_access():
            pass


async def test_a_policy_hears_of_new_weights_also_from_a_step_that_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, whole = threading.Event(), Learner.learn

    def learn(self: Learner, rows: Any, advantages: Any, scores: Any, stop: threading.Event) -> dict[str, float]:
        metrics = whole(self, rows, advantages, scores)
        learned.set()
        assert stop.wait(60)
        return metrics

    monkeypatch.setattr(Learner, "learn", learn)
    async with load_policy("tiny") as policy:
        running = asyncio.create_task(trained(tmp_path, policy=policy))
        assert await asyncio.to_thread(learned.wait, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert policy.version == 1


@pytest.mark.slow
async def test_the_tiny_model_learns_a_trivial_task(tmp_path: Path) -> None:
    @reward
    def early_letters(response: str) -> float:
        """Share of the text that is made of the first letters of the alphabet."""
        return sum(letter in "abcdefgh " for letter in response) / max(1, len(response))

    result = await trained(tmp_path, score=early_letters, steps=30, tasks_per_step=4, attempts=8, learning_rate=5e-3)
    rewards = [metrics["reward/mean"] for metrics in result.metrics.values()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3

"""Rollouts that run ahead of training, refills, and the content of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import Reward, reward
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError
from agentfly.core.events import Event, EventStream, RolloutStarted, StepFinished
from agentfly.core.run_directory import RunDirectory
from agentfly.core.trajectory import load_trajectories
from agentfly.rollouts.failure_budget import FailureBudgetExceeded
from agentfly.training.batch_source import collect_step_batch
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.rollout_queue import RolloutGroup
from agentfly.training.trainer import Trainer, TrainResult
from agentfly.viewing.diagnostics import TrainingDiagnostics
from tests.training.made_groups import attempted

TASKS = [f"Say something about {number}." for number in range(10)]
SMALL = {"tasks_per_step": 2, "attempts": 2, "steps": 4, "learning_rate": 3e-3, "dtype": "float32", "threads": 1}


@reward
async def later(context: Context) -> float:
    """The later attempt is the better one."""
    return float(context.attempt)


async def trained(
    path: Path, *, score: Reward = later, events: EventStream | None = None, **settings: Any
) -> TrainResult:
    agent = Agent(model="tiny", max_turns=1, max_tokens_per_turn=4)
    config = TrainConfig(**{**SMALL, **settings})
    return await Trainer(agent, TASKS, score, run_dir=path, config=config, events=events).run()


# --- what a step is made of, with groups that are made up -------------------------------------------------------------


class Made:
    """A source whose groups in ``good`` have a learning signal. It records how far groups were allowed at each take."""

    def __init__(self, good: Iterable[int], spoiled: Iterable[int] = ()) -> None:
        self._good = set(good)
        self._spoiled = set(spoiled)
        self.until = 0
        self.taken: list[tuple[int, int]] = []

    def allow_until(self, until: int) -> None:
        self.until = max(self.until, until)

    async def take(self, number: int) -> RolloutGroup:
        assert number < self.until
        self.taken.append((number, self.until))
        rewards = [None, None] if number in self._spoiled else [0.0, 1.0] if number in self._good else [1.0, 1.0]
        return attempted(number, rewards)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "tasks_per_step": 3, **settings})


async def test_a_step_takes_the_oldest_groups_and_lets_those_of_the_next_steps_begin() -> None:
    source = Made(range(100))
    gathered = await collect_step_batch(source, 6, config(max_staleness=2), steps_left=10)
    assert [group.number for group in gathered.groups] == [6, 7, 8]
    assert source.until == 6 + 3 * 3


async def test_no_group_starts_that_no_step_would_train() -> None:
    source = Made(range(100))
    await collect_step_batch(source, 6, config(max_staleness=4), steps_left=1)
    assert source.until == 6 + 3 * 2


async def test_groups_without_variance_are_made_up_for_by_the_next_of_the_order() -> None:
    source = Made([1, 3, 5])
    gathered = await collect_step_batch(source, 0, config(dynamic_sampling={"max_refills": 3}), steps_left=0)
    assert [group.number for group in gathered.trained_groups] == [1, 3, 5]
    assert [group.number for group in gathered.dropped_groups] == [0, 2, 4]
    assert gathered.metrics == {"sampling/groups": 6, "sampling/dropped_groups": 3, "sampling/refills": 2}


async def test_a_refill_starts_as_soon_as_it_is_certain_and_with_no_extra_group() -> None:
    source = Made([1, 2, 3])
    await collect_step_batch(source, 0, config(dynamic_sampling={}), steps_left=0)
    assert source.taken == [(0, 3), (1, 4), (2, 4), (3, 4)]


async def test_groups_missing_after_the_last_refill_are_not_replaced() -> None:
    gathered = await collect_step_batch(Made([0]), 0, config(dynamic_sampling={"max_refills": 2}), steps_left=0)
    assert [group.number for group in gathered.trained_groups] == [0]
    assert len(gathered.dropped_groups) == 2 + 2 + 2


async def test_a_step_that_infrastructure_spoils_stops_the_run() -> None:
    with pytest.raises(FailureBudgetExceeded, match="the box is gone"):
        await collect_step_batch(Made([0, 1, 2], spoiled=[1, 2]), 0, config(), steps_left=0)


# --- real rollouts ----------------------------------------------------------------------------------------------------


async def test_rollouts_run_ahead_of_the_weights_by_no_more_than_the_bound(tmp_path: Path) -> None:
    events, started_run, steps = EventStream(), {}, []  # type: ignore[var-annotated]

    def watch(event: Event) -> None:
        if isinstance(event, RolloutStarted):
            started_run[event.group_id] = len(steps)  # how many steps had been made
        elif isinstance(event, StepFinished):
            steps.append(event)

    with events.subscribed(watch):
        result = await trained(tmp_path, events=events, max_staleness=1, max_concurrent_rollouts=100)
    assert started_run == {f"train-{number}": max(0, number // 2 - 1) for number in range(8)}
    for step in steps:
        assert step.metrics["policy/staleness_max"] <= (0 if step.step == 1 else 1)
        assert step.metrics["rollout_seconds/trained/count"] == 4
        assert len(step.histograms["rollout_seconds/trained"]) == 4
    assert sum(step.metrics["rollout_seconds/dispatched/count"] for step in steps) == 16
    assert result.steps == 4


async def test_a_slow_rollout_is_trained_with_the_group_that_began_with_it(tmp_path: Path) -> None:
    @reward
    async def slow_for_some(context: Context, prompt: str) -> float:
        """Scoring takes its time for one task."""
        if prompt == slow:
            await asyncio.sleep(0.5)
        return float(context.attempt)

    run = RunDirectory(tmp_path / "plain")
    await trained(run.path, steps=1)
    slow = next(load_trajectories(run.trajectories_file(1))).task.prompt
    ahead = RunDirectory(tmp_path / "ahead")
    await trained(ahead.path, score=slow_for_some, max_staleness=3)
    order = [one.group_id for _, path in ahead.trajectory_files() for one in load_trajectories(path)]
    assert order == [f"train-{number}" for number in range(8) for _ in range(2)]


async def test_tasks_that_teach_nothing_are_replaced_and_counted(tmp_path: Path) -> None:
    @reward
    async def some(context: Context, prompt: str) -> float:
        """Only tasks with an even number tell attempts apart."""
        return float(context.attempt) if int(prompt[-2]) % 2 == 0 else 0.0

    result = await trained(tmp_path, score=some, steps=2, dynamic_sampling={"max_refills": 8}, max_staleness=1)
    run = RunDirectory(tmp_path)
    for step, metrics in result.metrics.items():
        trajectories = list(load_trajectories(run.trajectories_file(step)))
        assert metrics["groups"] == metrics["sampling/groups"]
        assert metrics["groups/zero_variance_fraction"] == metrics["sampling/dropped_groups"] / metrics["groups"]
        assert metrics["rows"] == 4
        assert metrics["rollouts"] == len(trajectories) == 2 * metrics["sampling/groups"]
        assert metrics["sampling/dropped_groups"] == metrics["sampling/groups"] - 2


async def test_a_step_whose_groups_are_all_dropped_changes_no_weight_and_the_run_continues(tmp_path: Path) -> None:
    @reward
    async def same(response: str) -> float:
        """Indifferent."""
        return 0.3

    result = await trained(tmp_path, score=same, steps=2, dynamic_sampling={"max_refills": 1})
    assert result.metrics[2]["sampling/dropped_groups"] == 4
    assert result.metrics[2]["policy/updates"] == 0
    lessons = TrainingDiagnostics()
    for metrics in result.metrics.values():
        lessons.add(metrics)
    assert lessons.messages() == ["nothing learned in 2 of 2 steps: all attempts at each task scored the same"]


async def test_a_reward_that_compares_attempts_gives_no_baseline_of_one(tmp_path: Path) -> None:
    @group_reward
    def ranked(responses: list[str]) -> list[float]:
        """By length."""
        return [float(len(response)) for response in responses]

    with pytest.raises(ConfigError, match="one greedy rollout"):
        Trainer(Agent(model="tiny"), TASKS, ranked, run_dir=tmp_path, config=TrainConfig(algorithm="remax"))


async def test_a_greedy_rollout_is_a_baseline_and_in_no_mean_and_no_loss(tmp_path: Path) -> None:
    seen: list[str] = []

    @reward
    async def greedy_is_poor(context: Context) -> float:
        """Rollouts of the most likely tokens get nothing."""
        seen.append(context.rollout_id)
        return 0.0 if context.rollout_id.startswith("greedy") else 1.0

    result = await trained(tmp_path, score=greedy_is_poor, algorithm="remax", steps=2)
    run = RunDirectory(tmp_path)
    assert sum(one.startswith("greedy") for one in seen) == 2 * 2
    for step, metrics in result.metrics.items():
        assert metrics["reward/mean"] == 1.0
        assert metrics["rollouts"] == metrics["rows"] == 4
        assert metrics["policy/updates"] == 1  # all are better than the baseline
        greedy = [one.rollout_id for one in load_trajectories(run.trajectories_file(step, "greedy"))]
        assert greedy == [f"greedy-{2 * step - 2}.0", f"greedy-{2 * step - 1}.0"]


async def test_without_a_sound_greedy_rollout_a_group_is_not_trained(tmp_path: Path) -> None:
    @reward
    async def flaky(context: Context) -> float:
        """The greedy rollout of the first task fails."""
        if context.rollout_id == "greedy-0.0":
            raise ConnectionError("the judge is away")
        return 1.0

    metrics = (await trained(tmp_path, score=flaky, algorithm="remax", steps=1)).metrics[1]
    assert metrics["rows"] == 2
    assert metrics["excluded/no_baseline"] == 2

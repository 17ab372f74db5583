"""A curriculum draws each epoch by earlier results, and draws the same after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agents.agent import Agent
from agentfly.agents.reward import reward
from agentfly.contexts.context import Context
from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory, load_trajectories
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.curriculum import (
    MAX_HISTORY,
    BySuccessRate,
    Curriculum,
    CurriculumTaskOrder,
    TaskOrder,
    TaskRecord,
    make_task_order,
)
from agentfly.training.trainer import Trainer

TASKS = [Task(str(number), id=str(number)) for number in range(6)]


def outcomes(task: str, solved: Iterable[float | None]) -> list[Trajectory]:
    return [
        Trajectory(f"x-0.{attempt}", "x-0", Task(task, id=task), attempt, reward=value)
        for attempt, value in enumerate(solved)
    ]


def ids(tasks: Iterable[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_a_record_counts_all_tries_and_remembers_the_latest() -> None:
    record = TaskRecord().after([True]).after([False] * MAX_HISTORY)
    assert record.tries == MAX_HISTORY + 1
    assert record.success_rate() == 0.0
    assert TaskRecord((1), (True,)).after([False, False, False]).success_rate(2) == 0.0
    assert TaskRecord().success_rate() is None


def test_without_opinions_a_curriculum_changes_nothing() -> None:
    assert make_task_order(TASKS, 3, Curriculum()).take(0, 20) == TaskOrder(TASKS, 3).take(0, 20)


def test_easier_tasks_come_first_and_untried_ones_in_between() -> None:
    order = CurriculumTaskOrder(TASKS[:3], 0, BySuccessRate(tries=4))
    order.take(0, 3)
    order.record_results(outcomes("0", [0, 0, 0, 1]))
    order.record_results(outcomes("1", [1, 1, 1, 0]))
    assert ids(order.take(3, 3)) == ["1", "2", "0"]


def test_tasks_that_are_always_or_never_solved_are_left_out_once_they_were_tried_enough() -> None:
    order = CurriculumTaskOrder(TASKS, 0, BySuccessRate(tries=2, skip_unsolved=True))
    order.take(0, 6)
    order.record_results(outcomes("0", [1, 1]) + outcomes("1", [0, 0]) + outcomes("2", [1]) + outcomes("3", [0, 1]))
    order.record_results(outcomes("4", [0, None, None]))  # what is unscored is no try
    assert sorted(ids(order.take(6, 4))) == ["2", "3", "4", "5"]
    assert order.metrics(10) == {"tasks/epoch": 1.0, "tasks/excluded": 2.0}


def test_an_epoch_that_would_be_empty_has_all_tasks() -> None:
    class Nothing(Curriculum):
        """Keeps nothing."""

        def keeps(self, task: Task, record: TaskRecord) -> bool:
            return False

    assert sorted(ids(make_task_order(TASKS, 0, Nothing()).take(0, 6))) == ids(TASKS)


@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8)), max_size=9
    ),
    st.data(),
)
def test_a_task_order_saved_at_any_point_continues_identically(
    history: list[tuple[int, list[tuple[int, bool]]]], data: st.DataObject
) -> None:
    saved_at = data.draw(st.integers(0, len(history)))
    orders = [CurriculumTaskOrder(TASKS, 1, BySuccessRate(tries=2, skip_unsolved=True))]
    cursor = 0
    for place, (count, came) in enumerate(history):
        if place == saved_at:
            state = json.loads(json.dumps(orders[0].state(cursor)))
            orders.append(CurriculumTaskOrder(TASKS, 1, BySuccessRate(tries=2, skip_unsolved=True)))
            orders[1].load_state(state)
        for order in orders:
            order.extend_to(cursor + count + 3)  # what is begun ahead is settled
        assert len({tuple(ids(order.take(cursor, count))) for order in orders}) == 1
        cursor += count
        for order in orders:
            order.record_results([one for task, solved in came for one in outcomes(str(task), [float(solved)])])


class Longest(Curriculum):
    """A simple curriculum, as a user would write it."""

    def __init__(self, least: int) -> None:
        self.least = least


def test_a_curriculum_is_described_without_its_memory_address() -> None:
    assert repr(Longest(3)) == repr(Longest(3)) == "Longest(least=3)"
    assert repr(Longest(3)) != repr(Longest(4))
    assert repr(BySuccessRate(tries=4)) == repr(BySuccessRate(tries=4))


@pytest.mark.parametrize("rank", [None, math.nan, "first"])
def test_a_key_by_which_tasks_cannot_be_sorted_is_refused(rank: Any) -> None:
    class Ranks(Curriculum):
        def rank(self, task: Task, record: TaskRecord) -> float:
            return rank

    with pytest.raises(UsageError, match=r"Return a number from rank\(\)"):
        CurriculumTaskOrder(TASKS, 0, Ranks()).take(0, 1)


def test_an_object_that_is_not_a_curriculum_is_refused() -> None:
    with pytest.raises(UsageError, match="Derive a class from it"):
        make_task_order(TASKS, 0, BySuccessRate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tries=0"):
        BySuccessRate(tries=0)


@reward
async def even_ones(context: Context, prompt: str) -> float:
    """Tasks with an even number are solved."""
    return float(int(prompt[-2]) % 2 == 0)


async def test_a_run_skips_solved_tasks_and_resumes_only_with_the_same_curriculum(tmp_path: Path) -> None:
    async def trained(steps: int, curriculum: Curriculum | None) -> None:
        await Trainer(
            Agent(model="tiny", max_turns=1, max_tokens_per_turn=4),
            [f"Say something about {number}." for number in range(4)],
            even_ones,
            run_dir=tmp_path,
            config=TrainConfig(steps=steps, tasks_per_step=2, attempts=2, checkpoint_every_steps=1, threads=1),
            curriculum=curriculum,
            resume=True,
        ).run()

    await trained(3, BySuccessRate(tries=2))
    await trained(4, BySuccessRate(tries=2))
    run = RunDirectory(tmp_path)
    tried = [
        [one.task.prompt[-2] for one in load_trajectories(path) if one.attempt == 0]
        for _, path in run.trajectory_files()
    ]
    assert sorted(tried[0] + tried[1]) == ["0", "1", "2", "3"]  # type: ignore[type-var]
    assert set(tried[2]) == set(tried[3]) == {"1", "3"}
    with pytest.raises(ConfigError, match=r"curriculum was 'BySuccessRate\(tries=2"):
        await trained(5, None)

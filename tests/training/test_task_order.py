"""The order of tasks: every task once per epoch, and the same order from any cursor."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agentfly.core.task import Task
from agentfly.training.curriculum import TaskOrder


def tasks(count: int) -> list[Task]:
    return [Task(f"task {number}") for number in range(count)]


@given(st.integers(1, 12), st.integers(0, 5), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_task_comes_once_an_epoch_however_the_steps_cut_it(size: int, seed: int, steps: list[int]) -> None:
    order = TaskOrder(tasks(size), seed)
    cursor, taken = 0, []
    for count in steps:
        taken += order.take(cursor, count)
        cursor += count
    assert taken == order.take(0, cursor)
    for start in range(0, cursor - size + 1, size):
        assert Counter(task.id for task in taken[start : start + size]) == Counter(task.id for task in tasks(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = TaskOrder(tasks(20), 0)
    assert first.take(0, 20) != first.take(20, 20)
    assert first.take(0, 20) != TaskOrder(tasks(20), 1).take(0, 20)


def test_a_killed_run_resumed_from_its_checkpoint_trains_each_task_once() -> None:
    steps = [TaskOrder(tasks(10), 3).take(cursor, 2) for cursor in (0, 2)]  # then killed; the checkpoint says cursor 4
    steps += [TaskOrder(tasks(10), 3).take(cursor, 2) for cursor in (4, 6, 8)]
    assert sorted(task.prompt for step in steps for task in step) == sorted(task.prompt for task in tasks(10))  # type: ignore[type-var]


def test_a_fingerprint_tells_tasks_apart_that_have_changed_under_their_ids() -> None:
    first, second = ([Task("What is it?", {"answer": answer}, id="a")] for answer in "xy")
    assert TaskOrder(first, 0).fingerprint != TaskOrder(second, 0).fingerprint


def test_a_fingerprint_distinguishes_tasks_and_their_order() -> None:
    prints = [TaskOrder(made, 0).fingerprint for made in (tasks(4), tasks(5), tasks(4)[::-1])]
    assert len(set(prints)) == 3
    assert TaskOrder(tasks(4), 9).fingerprint == prints[0]

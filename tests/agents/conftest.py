"""Fixtures of the agent layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from agentfly.contexts.context import Context
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory, Turn


@pytest.fixture
def trajectory() -> Trajectory:
    """A finished rollout that answered "four" to a task with the field ``answer``."""
    task = Task("What is 2 + 2?", {"answer": "4", "level": 1}, id="sum")
    turn = Turn(index=0, sequence=0, start=0, stop=1, text="four", ended_by_model=True)
    return Trajectory("rollout-0", "group-0", task, turns=[turn])


@pytest.fixture
async def context(trajectory: Trajectory) -> Context:
    """The context of that rollout. No test of this layer asks it for a resource."""
    return Context(trajectory, cast("Any", None))


@pytest.fixture
def recorded() -> tuple[list[Any], Callable[[Any], None]]:
    """A list, and a function that adds to it."""
    values: list[Any] = []
    return values, values.append

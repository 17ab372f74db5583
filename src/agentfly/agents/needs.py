"""Needs: the resources that a function says it uses, before it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentfly.errors import message_of
from agentfly.resources.spec import ResourceSpec
from agentfly.task import Task

Spec = ResourceSpec[Any]

Needs = Sequence[Spec] | Callable[[Task], Sequence[Spec]]
"""The specs themselves, or a function from the task to them, for instance where each task has an image of its own."""


def checked_needs(needs: Any) -> Needs:
    """What was written as ``resources=``, as it can be kept.

    Raises:
        ValueError: it is neither specs nor a function.
    """
    return needs if callable(needs) and not isinstance(needs, ResourceSpec) else _specs(needs)


def needs_for(needs: Needs, task: Task) -> tuple[Spec, ...]:
    """The specs that a task makes necessary.

    Raises:
        ValueError: the function that says so failed or returned something else.
    """
    if not callable(needs):
        return tuple(needs)
    try:
        found = needs(task.copy())
    except Exception as error:
        raise ValueError(
            f"resources= is a function, which failed for task {task.id} with {type(error).__name__}: "
            f"{message_of(error)}"
        ) from error
    return _specs(found)


def _specs(needs: Any) -> tuple[Spec, ...]:
    if isinstance(needs, Iterable) and not isinstance(needs, (str, bytes)):
        specs = tuple(needs)
        if all(isinstance(spec, ResourceSpec) for spec in specs):
            return specs
    kind = type(needs).__name__
    found = f"one {kind}: put it in a list, [{kind}(…)]" if isinstance(needs, ResourceSpec) else f"{needs!r:.200}"
    raise ValueError(
        "resources= is to be a list of resource specs, for instance [ContainerSpec(…)], or a function from the task "
        f"to one, and this is {found}"
    )

"""AgentFly: train language-model agents with reinforcement learning.

The public names are imported when they are first used, so that ``import agentfly`` stays light and fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.task import Task as Task
    from agentfly.trajectory import Trajectory as Trajectory

__version__ = "0.1.0"

_HOMES = {
    "Task": "agentfly.task",
    "Trajectory": "agentfly.trajectory",
}

__all__ = ["Task", "Trajectory", "__version__"]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'agentfly' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Trackers: experiment trackers that store a run's metrics in addition to its directory.

`TRACKERS` maps the names for the setting ``trackers`` to classes. Register your own with
``TRACKERS.register("mine", Mine)``: a class or function without arguments that returns a `Tracker`.
"""

from __future__ import annotations

from collections.abc import Callable

from agentfly.core.registry import Registry
from agentfly.training.trackers.backends import MLflowTracker, TensorBoardTracker, TrackioTracker, WandbTracker
from agentfly.training.trackers.tracker import TrackedRun, Tracker

__all__ = ["TRACKERS", "TrackedRun", "Tracker"]

TRACKERS: Registry[Callable[[], Tracker]] = Registry(
    "tracker",
    {"tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MLflowTracker, "trackio": TrackioTracker},
)
"""The trackers by name."""

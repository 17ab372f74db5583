"""Trackers: where a training run's metrics go besides its own directory.

`TRACKERS` holds them by name, and the configuration's ``trackers`` chooses any number of them. Register your own:
``TRACKERS.register("mine", Mine)``, a class (or function) without arguments that makes a `Tracker`.
"""

from __future__ import annotations

from collections.abc import Callable

from agentfly.training.registry import Registry
from agentfly.training.trackers.mlflow import MLflowTracker
from agentfly.training.trackers.tensorboard import TensorBoardTracker
from agentfly.training.trackers.tracker import TrackedRun, Tracker
from agentfly.training.trackers.trackio import TrackioTracker
from agentfly.training.trackers.wandb import WandbTracker

__all__ = ["TRACKERS", "TrackedRun", "Tracker"]

TRACKERS: Registry[Callable[[], Tracker]] = Registry("tracker")
"""The trackers by name."""

TRACKERS.register("tensorboard", TensorBoardTracker)
TRACKERS.register("wandb", WandbTracker)
TRACKERS.register("mlflow", MLflowTracker)
TRACKERS.register("trackio", TrackioTracker)

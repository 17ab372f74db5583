"""WandbTracker: Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import PrerequisiteError
from agentfly.training.trackers.tracker import TrackedRun, require_package

_STEP = "step"
_FINISH_S = 20.0


class WandbTracker:
    """Keeps metrics with Weights & Biases. The variables of wandb count: WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, ….

    With ``WANDB_MODE=offline`` it writes files, which ``wandb sync`` sends later.
    """

    def __init__(self) -> None:
        require_package("wandb", "wandb")
        self._run: Any = None
        if os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared"):
            import wandb

            if not wandb.login(prompt=False):
                raise PrerequisiteError(
                    "The tracker 'wandb' has no account to send metrics to: run `wandb login`, or set WANDB_API_KEY. "
                    "With WANDB_MODE=offline it needs none, and `wandb sync` sends the files later."
                )

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=run.id or None,
            resume="allow",
            config=dict(run.config),
            dir=str(run.directory.parent),  # it makes a directory named wandb there
            settings=wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_S),
        )
        # not wandb's own count of steps, which takes no step a second time: steps after a checkpoint may come again
        self._run.define_metric("*", step_metric=_STEP)
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`."""
        import wandb

        shown = {name: wandb.Histogram(list(values)) for name, values in histograms.items()}
        self._run.log({_STEP: step, **metrics, **shown})

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._run.finish()

"""The tracker backends: MLflow, Weights & Biases, TensorBoard and trackio."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from agentfly.core.errors import PrerequisiteError
from agentfly.training.trackers.tracker import TrackedRun, require_packages

_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # characters that MLflow does not allow in names of metrics
_METRICS_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 500  # characters; servers from 2.8 on take 6000


class MLflowTracker:
    """Stores metrics with MLflow at MLFLOW_TRACKING_URI, by default in ``mlflow.db`` in the current directory.

    The experiment is MLFLOW_EXPERIMENT_NAME, by default the run's project.
    """

    def __init__(self) -> None:
        require_packages("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run.id:
            self._id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = (Param(name, str(value)[:_LONGEST_PARAM]) for name, value in _flat(run.config))
        while some := list(islice(params, _PARAMS_AT_ONCE)):
            self._client.log_batch(self._id, params=some)
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`. MLflow stores no histograms."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = (Metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in metrics.items())
        while some := list(islice(points, _METRICS_AT_ONCE)):
            self._client.log_batch(self._id, metrics=some)

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


_STEP = "step"
_FINISH_S = 20.0


class WandbTracker:
    """Stores metrics with Weights & Biases. Its variables apply: WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, ….

    With ``WANDB_MODE=offline`` it writes files, which ``wandb sync`` uploads later.
    """

    def __init__(self) -> None:
        require_packages("wandb", "wandb")
        self._run: Any = None
        if os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared"):
            import wandb

            if not wandb.login(prompt=False):
                raise PrerequisiteError(
                    "The tracker 'wandb' has no account: run `wandb login`, or set WANDB_API_KEY. With "
                    "WANDB_MODE=offline it needs none, and `wandb sync` uploads the files later."
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
            dir=str(run.directory.parent),  # wandb creates its own directory there
            settings=wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_S),
        )
        # wandb's own step counter accepts each step only once, but steps after a checkpoint may be repeated
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


class TensorBoardTracker:
    """Writes TensorBoard event files. TensorBoard groups charts by the part of a name before the slash."""

    def __init__(self) -> None:
        require_packages("tensorboard", "train")
        self._writer: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory))
        return run.name

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`."""
        import numpy as np

        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writer.add_histogram(name, np.asarray(values), step)
        self._writer.flush()

    def finish(self) -> None:
        """See `Tracker.finish`."""
        self._writer.close()


class TrackioTracker:
    """Stores metrics with trackio. Its variables apply: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL."""

    def __init__(self) -> None:
        require_packages("trackio", "trackio")
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker.start`. The id of a run is its name."""
        import trackio

        name = run.id or run.name
        with contextlib.redirect_stdout(io.StringIO()):  # standard output is for results
            self._run = trackio.init(
                project=run.project,
                name=name,
                config=dict(run.config),
                resume="must" if run.id else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return str(self._run.name)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """See `Tracker.log`. Histograms are not stored; their statistics are among the metrics."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """See `Tracker.finish`."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
